"""From the graph of Dynamo or export to one normal form: pre-dispatch ATen, which autograd still differentiates."""

from fxrewrite.capture.normalize import normalize as normalize
