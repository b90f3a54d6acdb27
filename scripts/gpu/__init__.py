"""The parts of `scripts/gpu_check`, one subject a file.

    steps       what is run, as data                    machine      what this machine and its Python have
    driver      runs parts, each a process of its own   record       the file of results
    part        the inside of such a process            table        the docs' table
    shapes      random models, data, checkpoints        probe        one checkpoint asked in vLLM, in a process of its own
    answers     what checkpoints answer, against transformers or 16 bits

The rest are the steps themselves. `steps`, `driver`, `machine`, `record` and `table` import the standard library only,
so that any Python starts a check and says what is missing.
"""
