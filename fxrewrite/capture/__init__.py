"""From the graph of Dynamo or export to one normal form: pre-dispatch ATen, which autograd still differentiates."""

from fxrewrite.capture.custom_backward import custom_function as custom_function
from fxrewrite.capture.normalize import normalize as normalize
