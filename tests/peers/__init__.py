"""The test suites of other rewriters, case by case: what each asserts, asserted of this one."""
