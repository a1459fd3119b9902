"""Every setting of `forebay serve` in one table: name, default, unit, range and why.

Resolved once, from a TOML file, then the environment (``FOREBAY_PAGE_SIZE=32``), then flags; frozen afterwards. `forebay config`
and the command line's options are generated from this table, so neither can drift from it.
"""

import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from forebay.core.transfers.backup import WritePolicy
from forebay.core.transfers.policy import FetchPolicy

ENVIRONMENT_PREFIX = "FOREBAY_"
OTHER_VARIABLES = frozenset({"FOREBAY_CACHE_DIR"})
# What Kubernetes sets in every container of a namespace that has a service called forebay, or
# forebay-SOMETHING (kubernetes.io, "Services": environment variables).
_SERVICE_NAME = re.compile(
    r"FOREBAY_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?"
    r"|PORT_\d+_(?:TCP|UDP|SCTP)(?:_PROTO|_PORT|_ADDR)?)",
    re.ASCII,
)
_SERVICE_PORT_NAME = re.compile(r"FOREBAY_(?:\w+_)?PORT", re.ASCII)
_SERVICE_PORT_VALUE = re.compile(r"(?:tcp|udp|sctp)://(?:[\w.-]+|\[[0-9A-Fa-f:]+\]):\d+", re.ASCII)
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


class SettingsError(ValueError):
    """One line: what was given, what is allowed, what to do."""


class DType(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class ToolCallParserName(StrEnum):
    AUTO = "auto"
    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    JSON = "json"


class ReasoningParserName(StrEnum):
    AUTO = "auto"
    NONE = "none"
    THINK = "think"


class Kernels(StrEnum):
    AUTO = "auto"
    NATIVE = "native"
    NATIVE_AVX512BF16 = "native:avx512bf16"
    NATIVE_AVX512 = "native:avx512"
    NATIVE_AVX2 = "native:avx2"
    NATIVE_PLAIN = "native:plain"
    TORCH = "torch"


class KvDType(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"
    FP8_E4M3 = "fp8_e4m3"


class MessageSpecialTokens(StrEnum):
    TEXT = "text"
    PARSE = "parse"


class GenerationConfig(StrEnum):
    AUTO = "auto"
    NONE = "none"


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class Schedule(StrEnum):
    FCFS = "fcfs"
    PREFIX = "prefix"


class HostMode(StrEnum):
    CACHE = "cache"
    STAGING = "staging"


class FetchRoute(StrEnum):
    TICKET = "ticket"
    STAGED = "staged"
    OFF = "off"


@dataclass(frozen=True)
class Setting:
    """What a reader of `forebay config` wants to know of one setting. ``low`` and ``high`` are inclusive."""

    why: str
    unit: str = ""
    low: int | None = None
    high: int | None = None
    aliases: tuple[str, ...] = ()
    short_range: str = ""

    @property
    def range(self) -> str:
        if self.short_range or (self.low is None and self.high is None):
            return self.short_range
        return (
            f"{'' if self.low is None else self.low} to {'any' if self.high is None else self.high}"
        )


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one server. `None` means derived at start; the derived value is printed."""

    host: Annotated[str, Setting("address that the HTTP server listens on")] = "127.0.0.1"
    port: Annotated[
        int, Setting("port of the HTTP server; 0 takes a free one", low=0, high=65535)
    ] = 8000
    api_key: Annotated[
        str | None,
        Setting(
            "bearer token that every request must carry, or several separated by commas; none = open"
        ),
    ] = None
    served_model_name: Annotated[
        str | None,
        Setting(
            "names in the API, separated by commas, the first one leading; the model's own if not given",
            short_range="NAME[,NAME...]",
        ),
    ] = None
    admin_key: Annotated[
        str | None,
        Setting(
            "bearer token that flushes, timelines and other routes of operators must carry; none = --api-key counts"
        ),
    ] = None
    priority_limit: Annotated[
        int | None,
        Setting(
            "highest `priority` of a request without the admin key; 0 where there is an admin key, else any, if not given",
            low=0,
            high=2**31 - 1,
        ),
    ] = None
    salt_from: Annotated[
        str,
        Setting(
            "who shares cached prefixes: all clients (none), those of one API key (key), or of one value of a gateway's header",
            short_range="none, key or header:NAME",
        ),
    ] = "none"
    cors_origins: Annotated[
        str | None,
        Setting(
            "origins whose pages in a browser may use the API, separated by commas; pages of this machine (localhost) if not given",
            short_range="ORIGIN[,ORIGIN...], * or none",
        ),
    ] = None
    keep_alive_s: Annotated[
        int, Setting("how long a connection may be idle between two requests", "s", 1, 86400)
    ] = 75
    stream_heartbeat_s: Annotated[
        int,
        Setting("a stream that is silent this long gets a comment line; 0 = never", "s", 0, 3600),
    ] = 0
    tool_call_parser: Annotated[
        ToolCallParserName,
        Setting("how the model writes tool calls; auto: as its chat template or vocabulary says"),
    ] = ToolCallParserName.AUTO
    reasoning_parser: Annotated[
        ReasoningParserName,
        Setting("think: <think> parts are reasoning_content; auto: where the model knows them"),
    ] = ReasoningParserName.AUTO
    grammar_timeout_s: Annotated[
        int, Setting("a schema or regex that takes longer to compile is refused", "s", 1, 60)
    ] = 2
    strict_max_tokens: Annotated[
        bool, Setting("max_tokens beyond what fits are an error (400), not cut")
    ] = False
    pp: Annotated[
        int,
        Setting(
            "pipeline stages: processes that own a contiguous range of layers each",
            "stages",
            1,
            1024,
            ("--pipeline-parallel-size",),
        ),
    ] = 1
    tp: Annotated[
        int,
        Setting(
            "ranks that share each layer by heads", "ranks", 1, 1024, ("--tensor-parallel-size",)
        ),
    ] = 1
    dtype: Annotated[
        DType, Setting("weights and activations; auto = the model's own, wider for float16")
    ] = DType.AUTO
    device: Annotated[Device, Setting("where stages compute")] = Device.CPU
    kernels: Annotated[
        Kernels,
        Setting(
            "what computes; auto = on a CPU compiled for this machine at first use, where there is a"
            " C compiler, else PyTorch's; native = compiled or an error; native:NAME = compiled for"
            " that set of instructions"
        ),
    ] = Kernels.AUTO
    threads_per_rank: Annotated[
        int | None,
        Setting(
            "compute threads of one rank; cores / ranks on this machine if not given",
            "threads",
            1,
            1024,
        ),
    ] = None
    page_size: Annotated[
        int,
        Setting(
            "tokens of a page: the one unit of caching, copying and evicting", "tokens", 1, 4096
        ),
    ] = 64
    kv_dtype: Annotated[
        KvDType,
        Setting(
            "numbers of the KV cache in all tiers; auto = as computed; int8 and fp8_e4m3 have a scale for each token and head"
        ),
    ] = KvDType.AUTO
    device_memory: Annotated[
        int | None,
        Setting(
            "KV pages of one rank (L1); a share of the free memory if not given",
            "bytes",
            1,
            short_range="a size such as 512MiB",
        ),
    ] = None
    host_memory: Annotated[
        int | None,
        Setting(
            "KV pages of one rank in host memory (L2); twice the device's if not given",
            "bytes",
            1,
            short_range="a size such as 4GiB",
        ),
    ] = None
    host_mode: Annotated[
        HostMode,
        Setting(
            "host pages are a tier of their own, or there only on the way to and from the store"
        ),
    ] = HostMode.CACHE
    write_policy: Annotated[WritePolicy, Setting("when a full page is copied to host memory")] = (
        WritePolicy.WRITE_THROUGH
    )
    store: Annotated[
        str,
        Setting(
            "the store below host memory (L3): embedded (private, under the user's cache directory), embedded:DIR?dram=SIZE&ssd=SIZE, "
            "forebay://HOST:PORT, valkey://HOST:PORT, redis://HOST:PORT, mooncake://MASTER:PORT, file:DIR or none"
        ),
    ] = "embedded"
    fetch_route: Annotated[
        FetchRoute,
        Setting(
            "how a stored prefix reaches the stages: by ticket to all at once while the request waits, stage by stage between forwards "
            "(the usual way, to compare with), or not at all"
        ),
    ] = FetchRoute.TICKET
    fetch_policy: Annotated[
        FetchPolicy,
        Setting(
            "how long a request waits for its ticket: to the end (a read without an answer for 4 s is its end), only while it could "
            "not run anyway, or 2 s + 0.1 s per 1,024 tokens, at most 30 s"
        ),
    ] = FetchPolicy.TIMEOUT
    fetch_threshold: Annotated[
        int, Setting("stored prefixes shorter than this are computed", "tokens", 0, 1 << 20)
    ] = 256
    chunk_size: Annotated[
        int | None,
        Setting(
            "prefill tokens that one plan may run; smaller = steadier decodes, and stages that are all busy sooner; 512 with one stage "
            "and 256 with several if not given",
            "tokens",
            1,
            1 << 20,
            ("--chunked-prefill-size",),
        ),
    ] = None
    max_running: Annotated[
        int,
        Setting(
            "requests that may hold device pages at once", "requests", 1, 65536, ("--max-num-seqs",)
        ),
    ] = 64
    max_context: Annotated[
        int | None,
        Setting(
            "longest prompt + output; the model's own if not given",
            "tokens",
            1,
            1 << 30,
            ("--max-model-len",),
        ),
    ] = None
    message_special_tokens: Annotated[
        MessageSpecialTokens,
        Setting(
            "control tokens that a chat message spells: text like any other, or parsed, by which a message can make turns of its own"
        ),
    ] = MessageSpecialTokens.TEXT
    generation_config: Annotated[
        GenerationConfig,
        Setting(
            "auto = a request without sampling fields gets those of the model's generation_config.json; none = the API's defaults"
        ),
    ] = GenerationConfig.AUTO
    max_waiting: Annotated[
        int, Setting("requests that may queue; more are refused with 429", "requests", 0, 1_000_000)
    ] = 1000
    schedule: Annotated[
        Schedule, Setting("order of admission: arrival, or longest cached prefix first")
    ] = Schedule.FCFS
    seed: Annotated[int, Setting("seeds requests that bring none", low=0, high=2**63 - 1)] = 0
    check_invariants: Annotated[
        int,
        Setting(
            "the planner checks all of its books every so many steps, the cheap part of it always; 0 = never",
            "steps",
            0,
            1_000_000_000,
        ),
    ] = 0
    timeline: Annotated[
        Path | None,
        Setting(
            "directory for all processes' spans when the server ends, and for flight records; made if it is not there"
        ),
    ] = None
    # No setting: which settings somebody gave. What nobody asked for may be done without.
    given: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Field:
    """One setting with all that was said about it."""

    name: str
    type: Any
    default: Any
    setting: Setting

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def names(self) -> list[str]:
        """The name and its aliases, as a settings file or the environment may write them."""
        return [
            self.name,
            *(alias.removeprefix("--").replace("-", "_") for alias in self.setting.aliases),
        ]

    @property
    def is_size(self) -> bool:
        return self.setting.unit == "bytes"

    @property
    def range(self) -> str:
        """What is allowed, in words: the members of an enumeration, or the setting's own range."""
        if self.type is bool:
            return "true or false"
        if isinstance(self.type, type) and issubclass(self.type, StrEnum):
            return ", ".join(member.value for member in self.type)
        return self.setting.range


def fields() -> list[Field]:
    """All settings in the table's order."""
    hints = typing.get_type_hints(Settings, include_extras=True)
    found = []
    for info in msgspec.structs.fields(Settings):
        if info.name == "given":
            continue
        base, setting = typing.get_args(hints[info.name])
        found.append(Field(info.name, base, info.default, setting))
    return found


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A line for each variable that begins like a setting's and is none."""
    known = {name: field for field in fields() for name in field.names}
    found = []
    for key, value in sorted(environment.items()):
        name = key.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not key.startswith(ENVIRONMENT_PREFIX) or _is_for_others(key, value):
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {ENVIRONMENT_PREFIX}{near[0].upper()}?" if near else ""
            found.append(f"the environment has {key}, which is no setting{hint}")
    return found


def resolve(
    flags: Mapping[str, Any],
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    caller: str = "the command line",
) -> Settings:
    """Settings out of a TOML file, then the environment, then flags (``None`` = not given).

    Raises ``SettingsError`` for an unknown key, a wrong type or a value out of range; it names where the value came from.
    """
    known = {name: field for field in fields() for name in field.names}
    given: dict[str, tuple[str, Any]] = {}
    for key, value in ({} if file is None else _read_toml(file)).items():
        field = _known(key, known, str(file))
        given[field.name] = (f"{key} in {file}", value)
    for key, value in (os.environ if environment is None else environment).items():
        if key.startswith(ENVIRONMENT_PREFIX) and not _is_for_others(key, value):
            field = _known(
                key.removeprefix(ENVIRONMENT_PREFIX).lower(), known, f"the environment ({key})"
            )
            given[field.name] = (key, value)
    for key, value in flags.items():
        if value is not None:
            field = _known(key, known, caller)
            given[field.name] = (field.flag, value)
    by_name = {field.name: field for field in fields()}
    settings = Settings(
        **{name: _convert(by_name[name], where, value) for name, (where, value) in given.items()},
        given=frozenset(given),
    )
    if settings.host_mode is HostMode.STAGING and settings.store == "none":
        raise SettingsError(
            "--host-mode staging needs a store to stage pages for; name one with --store, or say --host-mode cache"
        )
    _check_texts(settings)
    return settings


def listed(text: str) -> tuple[str, ...]:
    """The entries of a setting that takes several, separated by commas."""
    return tuple(entry.strip() for entry in text.split(","))


def _check_texts(settings: Settings) -> None:
    """Raises ``SettingsError`` for a text that has a form and does not keep to it."""
    for flag, text in (
        ("--served-model-name", settings.served_model_name),
        ("--api-key", settings.api_key),
        ("--cors-origins", settings.cors_origins),
    ):
        if text is not None and not all(listed(text)):
            what = "is empty" if not text.strip() else f"is {text!r}, with an empty entry"
            hint = ", which would let everyone in; leave it out for an open server"
            raise SettingsError(f"{flag} {what}{hint if flag == '--api-key' else '; name one'}")
    if settings.admin_key == "":
        raise SettingsError("--admin-key is empty; give a key, or leave it out")
    if not re.fullmatch(r"none|key|header:[A-Za-z0-9!#$%&'*+.^_`|~-]+", settings.salt_from):
        raise SettingsError(
            f"--salt-from is {settings.salt_from!r}; allowed: none, key or header:NAME"
        )
    for origin in listed(settings.cors_origins or "none"):
        if origin not in ("*", "none") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise SettingsError(
                f"--cors-origins has {origin!r}; write it as http://HOST:PORT, without a path"
            )


def _is_for_others(key: str, value: str) -> bool:
    """Whether a variable is no setting but somebody else's word, whom nobody can ask not to say it."""
    if key in OTHER_VARIABLES or _SERVICE_NAME.fullmatch(key):
        return True
    return bool(_SERVICE_PORT_NAME.fullmatch(key) and _SERVICE_PORT_VALUE.fullmatch(value))


def parse_size(text: str | int) -> int:
    """Bytes of ``512MiB``, ``2GiB``, ``4096``. Raises ``SettingsError`` for anything else, and for 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text), re.IGNORECASE)
    if not match or match[2].lower() not in _UNITS:
        raise SettingsError(
            f"{text!r} is not a size; write it as 512MiB, 2GiB or a number of bytes"
        )
    if len(match[1]) > 20:
        raise SettingsError(
            f"a size of {len(match[1])} digits is not allowed; write it as 512MiB, 2GiB or a number of bytes"
        )
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < 1:
        raise SettingsError(f"the size {text!r} is not allowed; it must be at least 1 byte")
    return size


def format_size(size: int) -> str:
    """The size in the largest unit that leaves a number of at least 1: ``1.50GiB``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit.lower()]:
            return f"{size / _UNITS[unit.lower()]:.2f}{unit}"
    return f"{size}B"


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise SettingsError(f"settings file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"settings file {file} is not TOML: {error}") from error


def _known(key: str, known: Mapping[str, Field], where: str) -> Field:
    name = key.replace("-", "_")
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; `forebay config` lists all"
        raise SettingsError(f"{where} sets {key!r}, which is no setting{hint}")
    return known[name]


def _convert(field: Field, where: str, value: Any) -> Any:
    """``where``: what a message calls the value's place."""
    kinds = [kind for kind in typing.get_args(field.type) if kind is not type(None)]
    kind = kinds[0] if isinstance(field.type, types.UnionType) else field.type
    if isinstance(value, str) and any(map(_is_no_character, value)):
        raise SettingsError(f"{where} is {value!r}, which is no UTF-8; write it in UTF-8")
    try:
        if field.is_size:
            return parse_size(value)
        if kind is bool:
            return _switch(value)
        converted = (
            kind(value) if not (kind is int and isinstance(value, bool | float)) else _refuse()
        )
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None
    except (ValueError, TypeError):
        allowed = field.range if issubclass(kind, StrEnum) else _article(kind)
        raise SettingsError(f"{where} is {value!r}; allowed: {allowed}") from None
    if isinstance(converted, int):
        low, high = field.setting.low, field.setting.high
        if (low is not None and converted < low) or (high is not None and converted > high):
            raise SettingsError(
                f"{where} is {converted}; allowed: {field.range} {field.setting.unit}".rstrip()
            )
    return converted


def _is_no_character(letter: str) -> bool:
    """A byte that was no UTF-8, as Python hands it on (PEP 383)."""
    return "\ud800" <= letter <= "\udfff"


def _switch(value: Any) -> bool:
    """Raises ``ValueError``."""
    said = str(value).lower()
    if said not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise ValueError("neither true nor false")
    return said in ("true", "1", "yes", "on")


def _refuse() -> int:
    raise ValueError("not a whole number")


def _article(kind: type) -> str:
    return {bool: "true or false", int: "a whole number", str: "text", Path: "a path"}[kind]
