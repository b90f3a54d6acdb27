"""What a machine with a GPU, torch and transformers shows, without vLLM: the parts of the tier `bare`, but for the first.

    equal      quantizers, statistics and reducers against a CPU      kernels    Triton's kernels against torch
    layers     a block's layers by every scheme                       reduced    reducers' own time; prefill after them
    products   8-bit products by torch's own kernels                  whole      models from loading to the written folder
    training   gradients, recovery, rotation, KV ranges               suite      the test suite, as far as it can run there

`measure` takes times, kernels, waits and memory; `made` draws inputs, weights and signals like those of trained models. All of
it runs on a CPU with tiny shapes, too.
"""
