"""What vLLM's own parser makes of command lines, in the process that has imported vLLM."""

from __future__ import annotations

from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Parse `lines`, each the arguments after `vllm serve`.

    The result has for each what vLLM keeps of the names in `fields`, as text. Those of the numbers in `whole` are made into
    configurations of the engine, too, which reads their model.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    except ImportError:  # in vLLM 0.32
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

    parser = make_arg_parser(FlexibleArgumentParser())
    refused = []
    for model, *flags in job["lines"]:
        parsed = parser.parse_args(["--model", model, *flags])
        validate_parsed_serve_args(parsed)
        refused.append(AsyncEngineArgs.from_cli_args(parsed))
    parsed = [{name: repr(getattr(args, name)) for name in job["fields"]} for args in refused]
    for number in job["whole"]:
        refused[number].create_engine_config()  # which fills in defaults
    return {"parsed": parsed}
