"""Publish a checkpoint on the Hugging Face Hub: the plan of an upload, and the upload itself.

Only files in the manifest are uploaded, so that stray files in the folder are not published. Only the card is rewritten for the
repository, with its hash in the manifest; the local folder does not change.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcompress.export import card, draft_folder, launch_files, manifest
from vlmcompress.export.draft_folder import Draft
from vlmcompress.export.manifest import MANIFEST
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError

STALE = ["*.safetensors", "*.safetensors.index.json", f"{launch_files.FOLDER}/*"]
"""Files of earlier uploads that engines would read: deleted from the repository unless they are uploaded again."""


@dataclass(frozen=True)
class Upload:
    """The plan of an upload.

    Attributes:
        repository: `org/name`.
        folder: the checkpoint.
        sizes: path in the repository -> bytes, in order of paths.
        written: path -> text of files that replace those of the folder.
    """

    repository: str
    folder: Path
    sizes: Mapping[str, int]
    written: Mapping[str, str]

    @property
    def card(self) -> str:
        """The text of the model card."""
        return self.written[card.CARD]

    @property
    def base_model(self) -> bool:
        """Whether the card names the original by a Hub id."""
        return "\nbase_model: " in self.card.partition("\n---\n")[0]


def check_id(name: str, what: str) -> str:
    """Return `name`, or raise `UserError` if it is not a repository id; `what` is its description in the message."""
    if not card.is_owned(name):
        reason = card.id_problem(name) or "the owner is missing"
        raise UserError(f"{what} '{name}' is not a repository id ({reason}); write it like my-org/my-model")
    return name


def plan_upload(folder: Path, repository: str, *, base_model: str | None = None, measured: str | None = None) -> Upload:
    """Plan the upload of a checkpoint, which is assumed to be complete (see `vlmcompress doctor`).

    Args:
        repository: `org/name`.
        base_model: Hub id of the original.
        measured: a section of the card about results, in Markdown.

    Raises:
        UserError: an invalid id, or there is no manifest.
    """
    check_id(repository, "repository")
    if base_model is not None:
        check_id(base_model, "--base-model")
    record = manifest.read_manifest(folder)
    name = repository.partition("/")[2]
    text = card.render_card(record, folder, name, repository=repository, base_model=base_model, measured=measured)
    content = text.encode()
    described = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    files = {**record["files"], card.CARD: described}
    written = {
        card.CARD: text,
        MANIFEST: json.dumps(record | {"files": dict(sorted(files.items()))}, indent=2, ensure_ascii=False) + "\n",
    }
    sizes = {path: (folder / path).stat().st_size for path in files if path not in written}
    sizes |= {path: len(text.encode()) for path, text in written.items()}
    return Upload(repository, folder, dict(sorted(sizes.items())), written)


def plan_draft(folder: Path, repository: str, *, target: str | None = None) -> Upload:
    """Plan the upload of a draft head: its files, with a rewritten card.

    Args:
        repository: `org/name`.
        target: Hub id of the checkpoint that it drafts for.

    Raises:
        UserError: an invalid id, or the folder is not a draft of ours.
    """
    check_id(repository, "repository")
    if target is not None:
        check_id(target, "--base-model")
    draft = Draft.of(folder)
    text = draft_folder.card(draft.facts, repository, target)
    names = (draft_folder.WEIGHTS, "config.json", draft_folder.FACTS, f"{launch_files.FOLDER}/vllm.sh")
    sizes = {path: (folder / path).stat().st_size for path in names if (folder / path).is_file()}
    sizes[card.CARD] = len(text.encode())
    return Upload(repository, folder, dict(sorted(sizes.items())), {card.CARD: text})


def push(upload: Upload, *, private: bool = False) -> str:
    """Create the repository if it does not exist, upload, and return the repository's address.

    An interrupted upload resumes when it is started again.

    Args:
        private: make a new repository private; an existing one does not change.

    Raises:
        UserError: the user has set HF_HUB_OFFLINE, no token, no access, or no connection.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if hub.offline():
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or use --dry-run")
    if not get_token():
        raise UserError(
            "no token for the Hub; log in with `hf auth login` or set HF_TOKEN to one that may write, or use --dry-run"
        )
    try:
        with hub.online(), tempfile.TemporaryDirectory(prefix="vlmcompress-push-") as stage:
            for path in upload.sizes:  # links to files, and the texts that replace some of them
                place = Path(stage, path)
                place.parent.mkdir(parents=True, exist_ok=True)
                if path in upload.written:
                    place.write_text(upload.written[path], encoding="utf-8")
                else:
                    place.symlink_to((upload.folder / path).resolve())
            api = HfApi()
            api.create_repo(upload.repository, private=private or None, exist_ok=True)
            message = f"{upload.folder.resolve().name}, made by vlmcompress"
            api.upload_folder(
                repo_id=upload.repository, folder_path=stage, commit_message=message, delete_patterns=STALE
            )
    except HfHubHTTPError as error:
        raise UserError(_refused(upload.repository, error)) from error
    except hub.http_library().HTTPError as error:
        raise UserError(
            f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}); "
            "run it again, complete files are not sent twice"
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(f"{constants.ENDPOINT} does not answer like a Hub; set HF_ENDPOINT to one") from error
    except ValueError as error:  # the Hub validates the card before anything is sent
        said = " ".join(str(error).split())[:200]
        raise UserError(f"the Hub refuses the card ({said}); nothing was uploaded") from error
    return f"{constants.ENDPOINT}/{upload.repository}"


def _refused(repository: str, error: Any) -> str:
    """A one-line message for the Hub's refusal."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return (
            f"the Hub refuses to write {repository} (HTTP {status}); use a token with write access to "
            f"{repository.partition('/')[0]} (hf auth login)"
        )
    said = getattr(error, "server_message", None) or str(error)
    first = (said.strip().splitlines() or [type(error).__name__])[0][:200]
    return f"the Hub refused the upload of {repository} ({first}); run it again once that is fixed"
