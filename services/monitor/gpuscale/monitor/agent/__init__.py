"""The agent: reads the GPUs and the host it runs on, answers for them, and streams them to the fleet.

Only `nvml` calls the driver. No call of a driver runs on the event loop: `threads` has it made elsewhere. Nothing here
knows the fleet's own packages. Begin with `collector`, then `gpus` and `nvml.gpu_readings`.
"""
