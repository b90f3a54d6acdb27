"""Speed and memory of a checkpoint in the real engine, against its baseline.

    from vlmcompress.evaluation.speed.runs import run
    results = run("OUT", "MODEL", load="closed:8")
    results.bench.summary["serve"]["cold"]["request_throughput"].ratio

`prompts` makes conversations with images, `client` sends them to a server as a load says and takes the time, `serving` does so
for both sides in turn, checks by the server's `counters` that the work was done, and times the engine without a server;
`measure` makes figures and ratios of it, `runs` all of it in one call, `text` a page for a terminal.
"""
