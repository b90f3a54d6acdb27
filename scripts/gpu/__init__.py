"""The parts of `scripts/gpu_check`, one subject a file.

    steps       what is run, as data                    machine      what this machine and its Python have
    driver      runs parts, each a process of its own   wheels       packages for a machine without a package index
    part        the inside of such a process            record       the file of results
    shapes      random models and their data            table        the docs' table
    bare        steps for torch and transformers        engine       steps for vLLM

The modules here import the standard library only, but for what runs in a part, so that any Python starts a check and says what
is missing.
"""
