"""docs/configuration.md: every key of the configuration, as `resihp.wrapper.config.schema` declares it.

    python docs/make_configuration.py            writes the file beside this script

What stands behind a key is its docstring in the schema; limits, defaults and environment variables are read off the
same place. `tests/docs/test_configuration.py` fails when the file is not what this makes.
"""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from resihp.wrapper.config import values
from resihp.wrapper.config.schema import ENV_PREFIX, ENV_SEPARATOR, Configuration, Section
from resihp.wrapper.config.sources import SITE_FILE

TARGET = Path(__file__).resolve().with_name("configuration.md")

HEAD = f"""\
# Configuration

`docs/make_configuration.py` generates this page from `wrapper/config/schema.py`. Change a key's description there, not
here.

resihp takes each key from the first of these sources that sets it:

1. the command line (`resihp run --help` lists the options; options exist for the most used keys);
2. the environment: `RESIHP_SECTION__KEY`, with two underscores, for example `RESIHP_SLURM__SPARES=1`; lists as JSON,
   for example `RESIHP_HOOKS__EVENTS='["end"]'`;
3. the job file: `resihp run --config job.toml`, `resihp submit job.toml`;
4. `resihp.toml` in the current folder;
5. `config.toml` in `~/.config/resihp` (or `$XDG_CONFIG_HOME/resihp`);
6. `{SITE_FILE}`, which the administrator writes;
7. the default.

So two keys of one section may come from different sources. No key is ignored: an unknown key is an error (exit code 2)
that names its source and the nearest valid key. `resihp doctor --config job.toml` checks a file without running it.

Write times with their unit: `"24h"`, `"1h30m"`, `"45s"` or Slurm's `"2-00:00:00"`; sizes too: `"80GB"` or
`"79.5GiB"`. A short job file:

```toml
[job]
nodes = 4
gpus_per_node = 8
time = "24h"
command = ["python", "train.py"]

[layout]
tp = 4
pp = 2

[checkpoint]
every = 500

[slurm]
partition = "gpu"
spares = 1
```
"""

TAIL = """\
## Other environment variables

These are not configuration keys: set them in the environment only.

| variable | means |
|---|---|
| `RESIHP_HOME` | the folder of jobs and exclusions, shared by all nodes; `.resihp` in the current folder by default |
| `RESIHP_LOCAL` | the folder on each node's own disk for the journal and its copies; `/var/tmp/resihp-UID` by default |
| `RESIHP_STATE` | the folder with the list of your jobs in all folders; `~/.local/state/resihp` by default, as in XDG |
| `RESIHP_BACKEND` | `nccl`, the default if there is a GPU; `gloo`; `nccl-like`: NCCL's semantics on gloo, for tests |
| `PYTORCH_ALLOC_CONF` | torch's own; workers with `resihp.Trainer` use `expandable_segments:True` unless it is set |
| `RESIHP_SHARE_GPUS` | `1`: workers share the available GPUs; for tests on a machine with few GPUs, with gloo |
| `RESIHP_STRICT_ORDER` | `1`: gloo behaves like NCCL in its strictest mode; for tests |
| `RESIHP_EMULATED_LAYER_MS` | milliseconds of a layer's forward on an emulated device; for tests without GPUs |
| `RESIHP_EMULATED_HEAD_LAYERS` | duration of an emulated head, in layers; computed from its operations if not set |
| `RESIHP_EMULATED_LINK_MS` | milliseconds of a transfer between nodes over an emulated link; likewise |
"""


def document() -> str:
    parts = [HEAD]
    for name, field in Configuration.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, Section)
        parts.append(_section(name, model))
    return "\n".join([*parts, TAIL])


def _section(name: str, model: type[Section]) -> str:
    about = _one_line(model.__doc__ or "").removeprefix(f"[{name}]").lstrip(":, ")
    lines = [
        f"## [{name}]",
        "",
        about[:1].upper() + about[1:],
        "",
        "| key | takes | default | means |",
        "|---|---|---|---|",
    ]
    for key, field in model.model_fields.items():
        assert field.description, f"[{name}] {key} has no docstring in the schema"
        shown = f"`{key}`"
        if name != "site":
            shown += f"<br>`{ENV_PREFIX}{name.upper()}{ENV_SEPARATOR}{key.upper()}`"
        lines.append(f"| {shown} | {takes(key, field)} | {default(field)} | {_one_line(field.description)} |")
    return "\n".join([*lines, ""])


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def takes(key: str, field: FieldInfo) -> str:
    """What a value may be, in words."""
    metadata = _metadata(field.annotation, field.metadata)
    if any(isinstance(item, BeforeValidator) and item.func is values.duration for item in metadata):
        return "a time" + _limits(metadata, values_are_times=True)
    if any(isinstance(item, BeforeValidator) and item.func is values.duration_or_never for item in metadata):
        return f'a time, or `"{values.NO_LIMIT}"`'
    if any(isinstance(item, BeforeValidator) and item.func is values.size for item in metadata):
        return "a size"
    if any(isinstance(item, BeforeValidator) and item.func is values.count_or_share for item in metadata):
        return 'a whole number, 0 or more, or a share such as `"2%"`'
    kind = _plain(field.annotation)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{word!s}`" if word else "empty" for word in get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of texts"
    shares = [item for item in metadata if isinstance(item, Le) and float(item.le) <= 1]  # type: ignore[arg-type]
    assert kind is not float or key.endswith("_s") or shares
    words = {
        bool: "`true`, `false`",
        int: "a whole number",
        float: "a share" if shares else "a number of seconds",
        str: "text",
        SecretStr: "text, secret",
    }
    return words[kind] + _limits(metadata)


def _metadata(annotation: Any, outer: list[Any]) -> list[Any]:
    """What stands beside a type, in it, or in a part of it that may be left out."""
    found = list(outer)
    for part in (annotation, *(get_args(annotation) if _is_union(annotation) else ())):
        found += getattr(part, "__metadata__", ())
    return found


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (typing.Union, types.UnionType)


def _plain(annotation: Any) -> Any:
    """The type itself: without None, without what is annotated."""
    if _is_union(annotation):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    return get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def _limits(metadata: list[Any], *, values_are_times: bool = False) -> str:
    def shown(number: Any) -> str:
        return time(number) if values_are_times else f"{number:,}"

    least = next((item.ge for item in metadata if isinstance(item, Ge)), None)
    above = next((item.gt for item in metadata if isinstance(item, Gt)), None)
    most = next((item.le for item in metadata if isinstance(item, Le)), None)
    assert not any(isinstance(item, Lt) for item in metadata)
    if least is not None and most is not None:
        return f", {shown(least)} to {shown(most)}"
    words = [f"{shown(least)} or more"] if least is not None else []
    words += [f"more than {shown(above)}"] if above is not None else []
    words += [f"{shown(most)} at most"] if most is not None else []
    return "".join(f", {word}" for word in words)


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is None or value == "" or value == ():
        return "-"
    if any(isinstance(item, BeforeValidator) for item in _metadata(field.annotation, field.metadata)):
        return f'`"{time(value)}"`'
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{word}"' for word in value) + "]`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value:g}`"


def time(seconds: float) -> str:
    """As one writes it in a file: 1800 -> 30m."""
    parts, rest = [], int(seconds)
    for letter, unit in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, unit)
        if count:
            parts.append(f"{count}{letter}")
    return "".join(parts) or "0s"


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
