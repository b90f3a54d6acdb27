"""Run vLLM's OpenAI-compatible server, llama.cpp's or MLX's; flags after -- go to it."""

from __future__ import annotations

import argparse

from vlmcompress.cli import _flags
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import OK, Outcome
from vlmcompress.utils.errors import UserError

GROUP = "carry on"
PLACE = 40
PASSES_ON = "vllm serve"


def options(parser: Parser) -> None:
    parser.add_argument("out", metavar="OUT", help="folder of the checkpoint, or of the original")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, only this machine")
    parser.add_argument("--port", default=8000, help="default: 8000")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="context length; default: what fits")
    parser.add_argument("--images-per-request", aliases=["--images"], default=4, metavar="N", help="at most")
    parser.add_argument(
        "--videos-per-request", aliases=["--videos"], default=0, metavar="N", help="at most; default: none"
    )
    parser.add_argument(
        "--allowed-media-domains",
        metavar="HOST,...",
        help="hosts from which requests may have images fetched (none.invalid: from none); default: any",
    )
    parser.add_argument("--engine", choices=("vllm", "mlx"), help="default: the one that reads OUT, or else vllm")
    _flags.speculation(parser, "speculative decoding")
    parser.set_defaults(verbose=True)  # a server's log is useful


def run(args: argparse.Namespace) -> Outcome:
    """Replace this process by the server."""
    from vlmcompress.engines import llamacpp_server, mlx

    speculative = _flags.drafting(args, args.out)
    hosts = (args.allowed_media_domains or "").replace(",", " ").split()
    if args.allowed_media_domains is not None and not hosts:
        raise UserError(
            "--allowed-media-domains names no host; leave it out to allow any, write none.invalid to allow none"
        )
    refused = ["--videos-per-request"] * (args.videos_per_request != 0)
    refused += ["--images-per-request"] * (args.images_per_request != 4)
    refused += ["--allowed-media-domains"] * bool(hosts)
    refused += ["--draft or --speculative-config"] * bool(speculative)
    if args.engine == "mlx" or args.engine is None and mlx.is_mlx(args.out):
        refused += ["--max-model-len"] * (args.max_model_len is not None)
        mlx.serve(args.out, args.host, args.port, refused, args.extra)
    if llamacpp_server.is_gguf(args.out):
        llamacpp_server.serve_gguf(args.out, args.host, args.port, args.max_model_len, [*refused, *args.extra])
    from vlmcompress.engines.vllm.serve import serve

    serve(
        args.out,
        host=args.host,
        port=args.port,
        images=args.images_per_request,
        videos=args.videos_per_request,
        max_model_len=args.max_model_len,
        speculative=speculative,
        extra=[*(["--allowed-media-domains", *hosts] if hosts else []), *args.extra],
    )
    return OK, {"ok": True}, ""
