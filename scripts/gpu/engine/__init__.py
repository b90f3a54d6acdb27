"""What takes vLLM: the parts of the tier `engine`.

    kernels   every scheme loaded, with the kernels that run its layers      probe       a checkpoint in vLLM, a process of its own
    answers   what checkpoints answer, against transformers or 16 bits       serving     a scheme served at all, half, a quarter
    setting_up   makes the environment
"""
