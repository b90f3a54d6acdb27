"""Upload a checkpoint to the Hugging Face Hub after checking its files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress.cli import _process
from vlmcompress.cli._outcome import OK, Outcome
from vlmcompress.utils import model_folder
from vlmcompress.utils.errors import UserError

if TYPE_CHECKING:
    from vlmcompress.export.publish import Upload

GROUP = "carry on"
PLACE = 43
HEAD = 24  # lines of the card that are shown


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="folder of the checkpoint, or of a draft head")
    parser.add_argument("repository", metavar="ORG/NAME", help="repository; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--dry-run", action="store_true", help="show what would be uploaded; needs no token or network")
    parser.add_argument(
        "--verify", action="store_true", help="with --dry-run: read the weights, too, as an upload does"
    )
    parser.add_argument(
        "--base-model",
        metavar="ORG/NAME",
        help="the original's id (for a draft, its target's); default: from the manifest",
    )
    parser.add_argument("--results", metavar="DIR", help="report of eval or bench, for the card's tables")


def run(args: argparse.Namespace) -> Outcome:
    """Check names and files, then upload them, or with `--dry-run` show them."""
    model_folder.check_written(Path(args.out))
    _process.import_transformers()
    from vlmcompress.evaluation.doctor.draft import examine_draft
    from vlmcompress.evaluation.doctor.files import diagnose
    from vlmcompress.export import draft_folder, publish

    publish.check_id(args.repository, "repository")
    out = Path(args.out)
    drafts = (out / draft_folder.FACTS).is_file()
    weights = args.verify or not args.dry_run
    for check in examine_draft(out, None) if drafts else diagnose(out, weights=weights):
        if not check.ok:
            raise UserError(f"{out} is damaged, nothing is uploaded: {check.name}: {check.detail}")
    if drafts:
        if args.results:
            raise UserError(
                "--results is for a checkpoint; leave it out for a draft head, whose card has its own results"
            )
        upload = publish.plan_draft(out, args.repository, target=args.base_model)
    else:
        measured = None
        if args.results:
            from vlmcompress.evaluation.report.findings import Findings
            from vlmcompress.evaluation.report.text import card_section
            from vlmcompress.evaluation.results import load_results
            from vlmcompress.export import manifest

            results, record = load_results(args.results), manifest.read_manifest(out)
            side, bytes_after = results.candidate, record["size"]["weights_after"]
            if side.weight_bytes != bytes_after or side.layer_errors != record.get("errors", {}):
                raise UserError(
                    f"--results {args.results} is about another checkpoint than {out} ('{side.name}'); run eval again"
                )
            measured = card_section(Findings(results))
        upload = publish.plan_upload(out, args.repository, base_model=args.base_model, measured=measured)
    data: dict[str, Any] = {
        "ok": True,
        "repository": args.repository,
        "private": args.private,
        "files": dict(upload.sizes),
        "card": upload.card,
        "url": None,
    }
    if args.dry_run:
        from vlmcompress.utils.text import size, table

        rows = [(path, size(count)) for path, count in upload.sizes.items()]
        lines = upload.card.splitlines()
        head = [f"  | {line}".rstrip() for line in lines[:HEAD]] + (["  | ..."] if len(lines) > HEAD else [])
        kind = "private" if args.private else "public"
        title = f"Would upload {len(rows)} files, {size(sum(upload.sizes.values()))}, to {upload.repository} ({kind} if new):"
        return OK, data, "\n".join([title, table(rows), "", "Its card begins:", *head]) + _advice(upload)
    data["url"] = publish.push(upload, private=args.private)
    return OK, data, f"Uploaded {len(upload.sizes)} files to {data['url']}{_advice(upload)}"


def _advice(upload: Upload) -> str:
    """A line of advice if the card does not name the original; else empty."""
    if upload.base_model:
        return ""
    return "\nThe card names no original, as it was a local folder; add --base-model ORG/NAME."
