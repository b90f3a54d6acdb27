"""What a machine with a GPU, torch and transformers shows, without vLLM: the parts of the tier `bare`, but for the first.

    equal     quantizers, statistics and reducers on the GPU against a CPU      reduced   reducers' own time; prefill behind them
    whole     models quantized from loading to the written folder               products  8-bit products by torch's own kernels
    layers    a block's layers by every scheme                                  training  what needs gradients; rotation; KV ranges
    suite     the test suite, as far as it can run there

`measure` takes times, kernels, waits and memory; `made` draws inputs, weights and signals like those of trained models. All of
it runs on a CPU with tiny shapes, too.
"""
