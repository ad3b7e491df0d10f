"""Preloaded for meshes: rules are compiled and Dynamo is loaded once, and not in the process of each model."""

from tests.zoo.mesh import measure_on_mesh

measure_on_mesh("LlamaForCausalLM", "dp=2,sp=2,tp=2")
