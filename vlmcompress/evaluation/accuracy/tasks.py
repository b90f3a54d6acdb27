"""Suites: lm-eval tasks whose samples have ids, so that two models' answers can be paired.

A suite is a task or group in `eval/tasks` by name, a user's task as YAML, or plain data (image, question, answer) scored by
exact match. `limit` chooses a number of its samples, stratified by family.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmcompress.evaluation.accuracy import catalogue, local_data
from vlmcompress.evaluation.accuracy.compare import WITHOUT_FAMILY
from vlmcompress.evaluation.accuracy.thoughts import Thoughts, of_models
from vlmcompress.models.data import sources
from vlmcompress.models.data.samples import Sample
from vlmcompress.models.data.sources import PLAIN, Reading
from vlmcompress.models.data.video import Video
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.messages import note

CUSTOM = "custom"
DEFAULT = "world"
BUNDLED = (DEFAULT, "photo", "grounding")  # suites whose data are bundled with a demo model
YAML = (".yaml", ".yml")
EXAMPLES = "the folders of eval/tasks have examples"


@dataclass(frozen=True)
class Place:
    """The place of a sample: row `index` of its task's chosen documents."""

    id: str
    family: str
    task: str
    index: int


@dataclass(frozen=True)
class LoadedSuite:
    """A suite whose tasks and data are loaded and whose samples are chosen.

    Attributes:
        name: name of the bundled suite, of the YAML file without its suffix, or of the data file.
        source: description of the origin of its data.
        metric: name of the score, or "score" if the tasks have several; `scoring`: its definition, in a sentence.
        max_tokens: maximum tokens of an answer.
        available: number of samples before the choice.
        derived_ids: whether some samples had no id in the data and got a hash of their content.
        tasks: name -> lm-eval task with only the chosen documents.
        places: the chosen samples, in the order of asking.
        thoughts: how the models think before they answer.
    """

    name: str
    source: str
    metric: str
    scoring: str
    max_tokens: int
    available: int
    seed: int
    derived_ids: bool
    tasks: Mapping[str, Any]
    places: tuple[Place, ...]
    thoughts: Thoughts = Thoughts()

    def __len__(self) -> int:
        return len(self.places)

    def content_hash(self) -> str:
        """SHA-256 of the chosen samples, in order: task, id, question, pixels and expected answer."""
        digest = hashlib.sha256()
        for place in self.places:
            task = self.tasks[place.task]
            content = _content_id(task, task.eval_docs[place.index])
            digest.update(json.dumps([place.task, place.id, content]).encode())
        return digest.hexdigest()

    def pictures(self, identity: str) -> list[bytes]:
        """The images of a sample as PNG; empty for videos."""
        place = next(place for place in self.places if place.id == identity)
        task = self.tasks[place.task]
        images = task.doc_to_image(task.eval_docs[place.index]) or ()
        return [local_data.png(image) for image in images if not isinstance(image, Video)]


def load_suite(
    suite: str | Path | None,
    data: str | Path | None = None,
    *,
    candidate: str | Path,
    baseline: str | Path,
    limit: int | None = None,
    seed: int = 0,
    reading: Reading = PLAIN,
    thoughts: Thoughts | None = None,
) -> LoadedSuite:
    """Load a suite and choose its samples.

    Args:
        suite: name of a bundled task or group, a task's YAML file, or a data file or folder. None: exact match on `data`,
            or the world's test split if there is no data either.
        data: local copy of a named suite's data; see `local_data`.
        candidate, baseline: checkpoints; the data bundled with a demo model is found next to them.
        limit: number of samples to choose, in proportion to the families, and reproducible by the seed.
        reading: how rows of plain data are read.
        thoughts: how the models think; None: as their chat templates say.

    Raises:
        UserError: no such suite or data, no samples, duplicate ids, or missing images.
    """
    thoughts = of_models(candidate, baseline) if thoughts is None else thoughts
    if suite is None and data is not None:
        suite, data = data, None
    name = DEFAULT if suite is None else str(suite)
    plain = name not in catalogue.task_names() and Path(name).suffix not in YAML
    if reading != PLAIN and not plain:
        raise UserError(f"suite {name} defines how its data are read; --columns and --skip-bad are only for --data")
    if name in catalogue.task_names() or Path(name).suffix in YAML:
        bundled = sources.bundled_data(baseline, "test") or sources.bundled_data(candidate, "test")
        source = data or (bundled if name.partition("_")[0] in BUNDLED else None)
        if suite is None and source is None:
            raise UserError(
                f"no data is bundled with {baseline}; give data (--data FILE: image, question, answer) or a suite (--suite)"
            )
        tasks = _load_tasks(name, {"data": str(source)} if source else {})
    elif Path(name).exists() or len(Path(name).parts) > 1 or Path(name).suffix:
        if data is not None:
            raise UserError(f"suite {name} is already data; leave out --data {data}")
        return _longer(_custom(Path(name), reading, limit, seed), thoughts)
    else:
        source, tasks = data, _load_tasks(name, {}, lm_eval=True)
    name = Path(name).stem if Path(name).suffix in YAML else Path(name).name
    if not source:
        config = next(iter(tasks.values())).config
        source = (config.dataset_kwargs or {}).get("data_files") or config.dataset_path or ""
    return _longer(_choose(name, str(source), tasks, limit, seed), thoughts)


def _longer(suite: LoadedSuite, thoughts: Thoughts) -> LoadedSuite:
    """The suite with room for thoughts in its answers."""
    longest = 0
    for task in suite.tasks.values():
        options = dict(task.config.generation_kwargs or {})
        options["max_gen_toks"] = thoughts.most_tokens(int(options.get("max_gen_toks", 256)))
        task.set_config("generation_kwargs", options)
        longest = max(longest, options["max_gen_toks"])
    return replace(suite, thoughts=thoughts, max_tokens=longest)


@contextlib.contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Keep the logs and progress bars of lm-eval off the terminal."""
    import lm_eval.api.task as building

    logger = logging.getLogger("lm_eval")
    level, bar = logger.level, building.tqdm
    logger.setLevel(logging.ERROR)
    # `build_all_requests` (lm-eval 0.4.13, `api/task.py`) always shows a bar of the module's `tqdm`.
    building.tqdm = lambda iterable, **_: iterable
    try:
        yield
    finally:
        logger.setLevel(level)
        building.tqdm = bar


@functools.cache
def _everything() -> Any:
    """`_manager` with lm-eval's own tasks as well, which takes seconds."""
    return _manager({}, lm_eval=True)


def _manager(metadata: Mapping[str, Any], folders: Sequence[Path] = (), lm_eval: bool = False) -> Any:
    """lm-eval's index of our tasks and those in `folders`; `lm_eval`: also of lm-eval's own tasks."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("suites need lm-eval; pip install '.[eval]' in the checkout of vlmcompress")
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=[*catalogue.folders(), *folders], include_defaults=lm_eval, metadata=dict(metadata))


def _load_tasks(name: str, metadata: Mapping[str, Any], lm_eval: bool = False) -> dict[str, Any]:
    """Load the tasks of a suite: bundled, of a YAML file, or one of lm-eval (`lm_eval`), whose data is downloaded."""
    import datasets

    datasets.disable_progress_bars()
    file = Path(name)
    try:
        with quiet_lm_eval():
            if file.suffix not in YAML:
                manager = _everything() if lm_eval else _manager(metadata)
                if lm_eval and name not in manager.all_tasks:
                    close = did_you_mean(name, catalogue.task_names())
                    raise UserError(f"no suite is called '{name}', here or in lm-eval{close}")
                return manager.load([name])["tasks"]
            # Private in lm-eval 0.4.13; `TaskManager.load` only accepts the name of a group, which is in the file.
            from lm_eval.tasks._yaml_loader import load_yaml

            if not file.is_file():
                raise UserError(
                    f"suite {file} does not exist; give a file that does, or a name (vlmcompress list suites)"
                )
            keys = load_yaml(file, resolve_func=False)
            data = "group" in keys or {"dataset_path", "custom_dataset"} & keys.keys()
            if not keys.get("task") or not data:
                raise UserError(
                    f"suite {file} is not a task file: it has no {'dataset_path' if keys.get('task') else 'task'}; {EXAMPLES}"
                )
            group = keys.get("group")
            return _manager(metadata, [file.parent] if group else []).load([group or name])["tasks"]
    except UserError:
        raise
    except Exception as error:  # any error of a task file's functions or data
        text = " ".join(str(error).split())[:300]
        why = f"{type(error).__name__}: {text}"
        if isinstance(error, TypeError | AttributeError):  # Python's message does not name the key
            why = f"a key has a value of the wrong kind ({text}); {EXAMPLES}"
        raise UserError(f"suite {name} can't be loaded: {why}") from error


def _custom(file: Path, reading: Reading, limit: int | None, seed: int) -> LoadedSuite:
    """Load plain data, one conversation per row, and choose samples, all of whose images can be decoded."""
    from vlmcompress.evaluation.accuracy.lm import Conversations

    path = hub.local(file, "dataset", splits=hub.TEST)
    loaded = sources.load_samples(path, samples=None, seed=0, decode_images=False, answered=True, reading=reading)
    samples, total = list(loaded), len(loaded) + len(loaded.skipped)
    bad, checked = dict(loaded.skipped), set[str]()
    while True:  # a replacement for a bad sample may be bad as well
        named = all(sample.row_id is not None for sample in samples)  # other samples are identified by content
        chosen = [
            sample for sample in (stratified(samples, limit, seed) if named else samples) if sample.name not in checked
        ]
        checked.update(sample.name for sample in chosen)
        if not (undecodable := sources.undecodable(chosen)):
            break
        bad |= undecodable
        if not reading.allows(len(bad), total) or len(bad) == total:
            raise UserError(sources.bad_samples_message(path.name, bad, total, reading.skip_bad))
        for line in sources.skipped_lines(undecodable):
            note(line)
        samples = [sample for sample in samples if sample.name not in bad]
    with quiet_lm_eval():
        task = Conversations(CUSTOM, samples, [sample.row_id for sample in samples])
    return _choose(file.name, str(file), {CUSTOM: task}, limit, seed)


def _choose(name: str, source: str, tasks: dict[str, Any], limit: int | None, seed: int) -> LoadedSuite:
    """Assign ids and families to all samples, choose from them, and reduce each task to the chosen documents."""
    rows = [(task, *row) for task, loaded in tasks.items() for row in _rows(task, loaded)]
    ids = _unique([(task, identity) for task, identity, *_ in rows], source)
    samples = [Sample(identity, (), "", None, family) for identity, (_, _, family, _) in zip(ids, rows, strict=True)]
    chosen = {sample.id for sample in stratified(samples, limit, seed)}
    places, kept = [], {}
    for task, loaded in tasks.items():
        documents = [(identity, row[2]) for identity, row in zip(ids, rows, strict=True) if row[0] == task]
        indices = [index for index, (identity, _) in enumerate(documents) if identity in chosen]
        if indices:
            # lm-eval 0.4.13 `api/task.py`: `eval_docs` runs `process_docs` over `dataset[test_split]` whenever it is read.
            # the selected documents are already processed
            loaded.dataset = {
                loaded.config.test_split or loaded.config.validation_split: loaded.eval_docs.select(indices)
            }
            loaded.config.process_docs = None
            kept[task] = loaded
            places += [Place(*documents[document], task, index) for index, document in enumerate(indices)]
    metrics = {task_metric(task) for task in kept.values()}
    first = next(iter(kept.values()))
    return LoadedSuite(
        name=name,
        source=source,
        metric=metrics.pop() if len(metrics) == 1 else "score",
        scoring=str((first.config.metadata or {}).get("scoring", "")),
        max_tokens=0,  # see `_longer`
        available=len(rows),
        seed=seed,
        derived_ids=any(derived for *_, derived in rows),
        tasks=kept,
        places=tuple(places),
    )


def stratified(samples: Sequence[Sample], limit: int | None, seed: int) -> list[Sample]:
    """At most `limit` samples: families in proportion (largest remainders), within a family by a hash of seed and id."""
    if limit is None or limit >= len(samples):
        return list(samples)
    if limit < 1:
        raise UserError(f"--limit {limit}: must be at least 1")
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.family or WITHOUT_FAMILY, []).append(sample)
    shares = {name: limit * len(group) / len(samples) for name, group in groups.items()}
    quota = {name: int(share) for name, share in shares.items()}
    # Hamilton's method: integer parts first, the rest to the largest remainders, ties by name.
    by_remainder = sorted(shares, key=lambda name: (quota[name] - shares[name], name))
    for name in by_remainder[: limit - sum(quota.values())]:
        quota[name] += 1
    kept: set[str] = set()
    for name, group in groups.items():
        ranked = sorted(group, key=lambda s: hashlib.sha256(f"{seed} {s.id}".encode()).digest())
        kept |= {s.id for s in ranked[: quota[name]]}
    return [s for s in samples if s.id in kept]


def _rows(name: str, task: Any) -> Iterator[tuple[str, str, bool]]:
    """(id, family, whether the id was derived from the content) of each document of a task."""
    if task.OUTPUT_TYPE != "generate_until":
        raise UserError(f"task {name} has output_type {task.OUTPUT_TYPE}; only generate_until works with images")
    documents = task.eval_docs
    ids = list(documents["id"]) if "id" in documents.features else [None] * len(documents)
    families = list(documents["family"]) if "family" in documents.features else [name] * len(documents)
    repeats: Counter[str] = Counter()
    for index, (identity, family) in enumerate(zip(ids, families, strict=True)):
        derived = identity is None or identity == ""
        if derived:
            identity = _content_id(task, documents[index])
            repeats[identity] += 1
            identity += f"#{repeats[identity]}" if repeats[identity] > 1 else ""
        yield str(identity), WITHOUT_FAMILY if family is None else str(family), derived


def _content_id(task: Any, document: Mapping[str, Any]) -> str:
    """A hash of question, images, videos and expected answer."""
    digest = hashlib.sha256(json.dumps([task.doc_to_text(document), str(task.doc_to_target(document))]).encode())
    for image in task.doc_to_image(document) or ():
        if isinstance(image, Video):
            digest.update(image.digest())
        else:
            digest.update(repr((image.mode, image.size)).encode() + image.tobytes())
    return digest.hexdigest()[:16]


def _unique(ids: Sequence[tuple[str, str]], source: str) -> list[str]:
    """The data's ids, prefixed with the task's name if two tasks share one.

    Args:
        ids: task and id of each sample.
        source: origin of the data, for the message about duplicate ids.
    """
    if repeated := [pair for pair, count in Counter(ids).items() if count > 1]:
        task, identity = repeated[0]
        what = f"{len(repeated)} ids repeat in {source}, e.g. '{identity}'" if source else f"{len(repeated)} ids repeat"
        raise UserError(f"task {task}: {what}; give every sample its own id")
    plain = [identity for _, identity in ids]
    return plain if len(set(plain)) == len(plain) else [f"{task}/{identity}" for task, identity in ids]


def task_metric(task: Any) -> str:
    """The metric by which samples are compared: the first of the task's metrics."""
    return next(iter(task.aggregation()))
