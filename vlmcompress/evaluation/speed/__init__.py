"""Speed and memory of a checkpoint in the real engine, against its baseline.

    from vlmcompress.evaluation.speed.runs import run
    results = run("OUT", "MODEL", load="closed:8")
    results.bench.summary["serve"]["cold"]["request_throughput"].gain

`prompts` creates conversations with images, `client` sends them to a server with a given load and measures times, `serving`
does this for both sides alternately and verifies the work with the server's `counters`; `measure` computes figures and ratios,
and `runs` is the whole benchmark.
"""
