"""Every Python block of README.md and docs/ runs; the blocks of one file share their names, from top to bottom."""

import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_blocks(path: Path) -> None:
    text = path.read_text()
    module = ModuleType("__docs__")
    sys.modules[module.__name__] = module  # dataclasses and pydantic look up the module of a class
    try:
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start(1))
            code = "\n" * line + block[1]  # so that tracebacks show the line of the document
            try:
                exec(compile(code, str(path), "exec"), module.__dict__)
            except Exception as error:
                raise AssertionError(
                    f"{path.name}, block at line {line + 1}: {type(error).__name__}: {error}"
                ) from error
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(path)


def test_blocks_share_names_and_a_failure_names_its_line(tmp_path: Path) -> None:
    document = tmp_path / "guide.md"
    document.write_text(
        "# Guide\n\n```python\nlength = 3\n```\n\ntext\n\n```python\nassert length == 3\nlength / 0\n```\n"
    )
    with pytest.raises(AssertionError, match=r"guide\.md, block at line 10: ZeroDivisionError") as failure:
        run_blocks(document)
    (last,) = traceback.extract_tb(failure.value.__cause__.__traceback__)[-1:]
    assert (last.filename, last.lineno, last.line) == (str(document), 11, "length / 0")


def test_all_settings_are_in_the_training_guide() -> None:
    from autosp_rules import AutoSPConfig

    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", (ROOT / "docs/training.md").read_text(), re.MULTILINE)
    assert rows == [
        (name, repr(field.get_default(call_default_factory=True))) for name, field in AutoSPConfig.model_fields.items()
    ]
