"""What a training framework must be told about the sequence axis: one module a framework, which imports it lazily.

integrations.accelerate.share_batches(trainer, mesh)     transformers.Trainer, trl, accelerate.Accelerator
integrations.deepspeed.replace_autosp()                  DeepSpeed's own configuration of AutoSP
"""
