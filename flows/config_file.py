"""From a YAML file and `--set a.b=c` to a PipelineConfig; whatever is wrong becomes one readable InputError."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml import YAMLError

from flows import yaml_loader
from flows.config import PipelineConfig
from recsys_core.atomic import write_text
from recsys_core.data.interactions.config import Split
from recsys_core.errors import InputError, printable, shown
from recsys_core.launching.config import Launcher
from tasks.tuning.config import RangeConfig, label_of

VARIED = ("model", "tables", "loss", "training", "sharding")
"""Groups of settings that `nightjar tune` may vary."""
_STEP = r'(?:"[^"]+"|[^".]+)'
FIXED = {
    "training.validation": "trials are compared by it, so it is the same for all; leave it out",
    "training.warm_start": "trials start from scratch; leave it out",
}
MOST_PROBLEMS = 20
"""Listed in one message."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """The config in `path` with `overrides` ("training.batch_size=8192", value in YAML) put over it.

    A name with a dot in it is quoted: 'tables."item.brand".dim=8'.

    Relative paths, in the file and in overrides alike, are taken from the folder of the file. Raises InputError.
    """
    raw = _read(path)
    for override in overrides:
        _override(raw, override)
    try:
        config = PipelineConfig.model_validate(raw)
    except ValidationError as error:
        details = _details(error)
        problems = [_sentence(detail, raw) for detail in details[:MOST_PROBLEMS]]
        raise _listed(path, problems, more=len(details) - len(problems)) from None
    if config.tuning is None:
        return config.anchored(path.parent)
    wrong: list[str] = []
    ranges = {name: _checked_range(config, name, wish, problems=wrong) for name, wish in config.tuning.ranges.items()}
    if wrong:
        raise _listed(path, [f"tuning.ranges: {problem}" for problem in wrong])
    tuning = config.tuning.model_copy(update={"ranges": ranges})
    return config.model_copy(update={"tuning": tuning}).anchored(path.parent)


def with_settings(config: PipelineConfig, settings: Mapping[str, Any]) -> PipelineConfig:
    """`config` with other values of some settings, by dotted name, and without tuning; InputError if they contradict."""
    found, _, problems = _tried(config, settings)
    if found is None:
        raise InputError("; ".join(problems))
    return found


def to_paste(config: PipelineConfig, settings: Mapping[str, Any]) -> str:
    """YAML of what `settings` set in `config`, for the user's own file; a list of which they set a part is given whole."""
    raw = with_settings(config, settings).model_dump(mode="json")
    groups: dict[str, Any] = {}
    for dotted in settings:
        whole = re.sub(r"\.\d+(\..*)?$", "", dotted)
        _put(groups, whole, _at(raw, whole), given=dotted)
    return yaml_loader.dump(groups)


def _listed(path: Path, problems: Sequence[str], *, more: int = 0) -> InputError:
    rest = [f"and {more:,} more"] if more else []
    return InputError("\n".join([f"{path}:", *(f"  {problem}" for problem in (*problems, *rest))]))


def _tried(config: PipelineConfig, settings: Mapping[str, Any]) -> tuple[PipelineConfig | None, bool, list[str]]:
    """(the config or None, whether a setting itself is wrong and not only what it is combined with, what is wrong)."""
    raw = config.model_dump(mode="json") | {"tuning": None}
    for dotted, value in settings.items():
        _put(raw, dotted, value, given=f"tuning.ranges.{dotted}")
    try:
        return PipelineConfig.model_validate(raw), False, []
    except ValidationError as error:
        details = _details(error)
        names = tuple(name.replace('"', "") for name in settings)
        own = [detail for detail in details if detail["type"] != "value_error" or _dotted(detail["loc"], raw).startswith(names)]
        return None, bool(own), [_sentence(detail, raw) for detail in own or details]


def _checked_range(config: PipelineConfig, dotted: str, wish: RangeConfig, *, problems: list[str]) -> RangeConfig:
    """The range in the type of its setting; whatever its setting does not take is added to `problems`."""
    if dotted.partition(".")[0] not in VARIED or "." not in dotted:
        problems.append(
            f"{dotted}: all trials share one ingest and end with training, so what varies is a setting of {', '.join(VARIED)}"
        )
        return wish
    fixed = next((why for group, why in FIXED.items() if f"{dotted}.".startswith(f"{group}.")), None)
    if fixed is not None:
        problems.append(f"{dotted}: {fixed}")
        return wish
    answers = [(probe, *_tried(config, {dotted: probe})) for probe in wish.probes]
    good = {label_of(probe): _at(found.model_dump(mode="json"), dotted) for probe, found, _, _ in answers if found is not None}
    # Two settings that contradict each other may both vary; one that goes with no value of the range at all is wrong.
    wrong = [told for _, _, is_own, told in answers if is_own] or [told for _, _, _, told in answers if not good]
    if wrong:
        problems.extend(wrong[0])
        return wish
    try:
        return wish.typed(good)
    except ValueError as error:
        problems.append(f"{dotted}: {error}")
        return wish


def _at(raw: Any, dotted: str) -> Any:
    for key in _steps(dotted, given=dotted):
        raw = raw[int(key)] if isinstance(raw, list) else raw[key]
    return raw


def _details(error: ValidationError) -> list[ErrorDetails]:
    """A key that is not known is also one that is missing elsewhere: unknown keys come first and alone."""
    details = error.errors(include_url=False)
    return [detail for detail in details if detail["type"] == "extra_forbidden"] or details


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(yaml_loader.MOST_CHARACTERS + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; `nightjar init {path}` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    raw = _parsed(text, subject=f"{path}:")
    if not isinstance(raw, dict):
        raise InputError(f"{path}: holds {type(raw).__name__}, expected a mapping with keys like interactions: and workspace:")
    return raw


def _parsed(text: str, *, subject: str) -> Any:
    try:
        return yaml_loader.load(text)
    except YAMLError as error:
        raise InputError(f"{subject} is not valid YAML: {error}") from None
    except yaml_loader.TooLargeError as error:
        raise InputError(f"{subject} {error}") from None


def _override(raw: dict[str, Any], override: str) -> None:
    given = f"--set {printable(override, at_most=200)}"
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise InputError(f"{given}: expected a.b=value, e.g. --set training.batch_size=8192")
    _put(raw, dotted.strip(), _parsed(text, subject=f"{given}: the value"), given=given)


def _steps(dotted: str, *, given: str) -> list[str]:
    """a."b.c".d -> a, b.c, d."""
    if re.fullmatch(rf"{_STEP}(\.{_STEP})*", dotted) is None:
        raise InputError(f'{given}: expected a.b=value, names without quotes, or all in quotes where they hold a dot: a."b.c"')
    steps = [quoted or plain for quoted, plain in re.findall(r'"([^"]+)"|([^".]+)', dotted)]
    if len(steps) > yaml_loader.MOST_DEPTH:
        raise InputError(f"{given}: {len(steps):,} names, one inside the other, and no setting is that deep")
    return steps


def _put(raw: dict[str, Any], dotted: str, value: Any, *, given: str) -> None:
    """Sets raw[a][b] for the name a.b; groups that are not there are made. given: what the user wrote, for errors."""
    *parents, last = _steps(dotted, given=given)
    level: Any = raw
    for position, key in enumerate(parents):
        if isinstance(level, list):
            if not (key.isdecimal() and key.isascii() and int(key[:9]) < len(level)):
                place = ".".join(parents[:position])
                raise InputError(f"{given}: {place} is a list of {len(level)}; name one by its number, from 0")
            level = level[int(key[:9])]
        else:
            level[key] = {} if level.get(key) is None else level[key]
            level = level[key]
        if not isinstance(level, dict | list) or (isinstance(level, list) and position + 1 == len(parents)):
            place = ".".join(parents[: position + 1])
            raise InputError(f"{given}: {place} is the value {shown(level)}, not a group of settings")
    level[last] = value


def _sentence(detail: ErrorDetails, raw: Mapping[str, Any]) -> str:
    place = printable(_dotted(detail["loc"], raw))
    place = place if len(place) <= 200 else place[:197] + "..."
    match detail["type"]:
        case "extra_forbidden":
            return f"{place}: unknown key; {_nearest(place)}"
        case "missing":
            return f"{place}: is missing and has no default; set it"
        case "union_tag_not_found" | "union_tag_invalid":
            union = Launcher if place == "launcher" else Split
            kinds = ", ".join(member.model_fields["kind"].default for member in nested_models(union))
            return f"{place}: set kind to one of {kinds}"
        case "value_error":
            message = detail["msg"].removeprefix("Value error, ")
            return f"{place}: {message}" if place else message
        case _:
            return f"{place}: {detail['msg']}, but it is {shown(detail['input'])}"


def _dotted(loc: tuple[int | str, ...], raw: Any) -> str:
    # pydantic puts the chosen member of a union into the location; what the user wrote has no such level.
    names: list[str] = []
    for position, step in enumerate(loc):
        is_last = position == len(loc) - 1
        if step in raw if isinstance(raw, dict) else isinstance(raw, list) and isinstance(step, int) and step < len(raw):
            raw = raw[step]
        elif not is_last or isinstance(step, int) or not isinstance(raw, dict):
            continue
        names.append(str(step))
    return ".".join(names)


def _nearest(dotted: str) -> str:
    known = sorted(set(setting_names(PipelineConfig)))
    dotted = re.sub(r"\.\d+(?=\.)", "", dotted)  # the place in a list of groups
    parent, _, name = dotted.rpartition(".")
    siblings = {path.rpartition(".")[2] for path in known if fnmatchcase(parent, path.rpartition(".")[0])}
    close = difflib.get_close_matches(name, siblings, n=1)
    if close:
        return f"did you mean {parent}{'.' if parent else ''}{close[0]}?"
    elsewhere = [path for path in known if path.rpartition(".")[2] == name]
    if not elsewhere and siblings:
        return f"known here: {', '.join(sorted(siblings))}"
    elsewhere = elsewhere or difflib.get_close_matches(dotted, known, n=1)
    return f"did you mean {' or '.join(elsewhere)}?" if elsewhere else f"{parent} is not a group of settings"


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings of `model`, groups included, over all members of unions; `*` is a key of the user's own."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = f"{prefix}{name}.*." if get_origin(field.annotation) is dict else f"{prefix}{name}."
        for member in nested_models(field.annotation):
            yield from setting_names(member, inner)


def nested_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models that a field with this annotation may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from nested_models(argument)


def dump_config(config: PipelineConfig, path: Path) -> None:
    """Writes `config` so that load_config reads it back; replaced atomically, since a resumed run writes it again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, yaml_loader.dump(config.model_dump(mode="json")))
