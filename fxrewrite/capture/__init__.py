"""From the graph that Dynamo or export gives to one spelling: pre-dispatch ATen with autograd above it."""

from fxrewrite.capture.normalize import normalize as normalize
