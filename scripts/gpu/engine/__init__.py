"""What takes vLLM: the parts of the tier `engine`.

kernels      every scheme loaded, and its layers' kernels      probe      a checkpoint in vLLM, a process of its own
answers      checkpoints' answers against transformers         serving    a scheme at all, half, a quarter of the tokens
setting_up   makes the environment
"""
