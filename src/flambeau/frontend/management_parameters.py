"""The parameters of the management API: one table of types, limits and defaults for HTTP, gRPC and OpenAPI."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flambeau.config.model import MAX_WORKERS
from flambeau.errors import BadRequest
from flambeau.frontend.operations import PAGE, Registration
from flambeau.serving.registry import MAX_HANDLER, MAX_NAME
from flambeau.serving.traffic_split import WHOLE

logger = logging.getLogger(__name__)

LARGEST = 2**31 - 1  # of 32 bits, as in the messages of gRPC
MAX_BATCH_SIZE = 65_536
MAX_URL = 8192  # pre-signed URLs are long
MAX_SHOWN = 60  # characters of an invalid value in its error message
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)  # more digits are beyond any limit
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # and half characters
_FLAGS = {"true": True, "false": False}
_NOUNS: dict[type, str] = {dict: "an object", list: "a list", bool: "true or false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallParameter:
    """One parameter of a call. An empty value counts as absent, unless `keeps_empty`."""

    name: str
    kind: Literal["text", "whole", "flag"]
    doc: str
    default: Any = None
    low: int = 0  # limits of a whole number
    high: int = LARGEST
    lenient_low: int | None = None  # lower numbers that lenient reading accepts
    max_length: int = MAX_NAME  # characters of a text
    choices: tuple[str, ...] = ()  # documented here; the operation words the error
    is_required: bool = False  # documented here; the operation words the error
    keeps_empty: bool = False
    is_location: bool = False  # where no file can be, none is found: the operation answers that
    is_token: bool = False  # a number that clients get and send as text

    @property
    def schema(self) -> dict[str, Any]:
        """Its OpenAPI schema."""
        if self.kind == "flag":
            return {"type": "boolean"}
        if self.kind == "whole" and not self.is_token:
            return {"type": "integer", "minimum": self.low, "maximum": self.high}
        if self.choices:
            return {"type": "string", "enum": [*self.choices]}
        return {"type": "string"} if self.is_token else {"type": "string", "maxLength": self.max_length}

    def read(self, value: Any) -> Any:
        """The checked value; `value` is text, or what JSON holds. Raises BadRequest, which names the parameter."""
        if value is None or (value == "" and not self.keeps_empty):
            return self.default
        if self.kind == "whole":
            return self._read_whole(value)
        return self._read_flag(value) if self.kind == "flag" else self._read_text(value)

    def read_leniently(self, value: Any) -> Any:
        """The value as existing clients rely on: a number that is not understood counts as absent, a flag as false.

        Each is a warning. A number above the limit is still an error.
        """
        try:
            return self.read(value)
        except BadRequest as error:
            number = to_whole(value) if self.kind == "whole" else None
            if self.kind == "text" or (number is not None and number > self.high):
                raise
            if number is not None and self.lenient_low is not None and number >= self.lenient_low:
                return number
            used = False if self.kind == "flag" else self.default
            logger.warning("%s. It is ignored%s", error, "" if used is None else f": {used} is used")
            return used

    def _read_whole(self, value: Any) -> int:
        number = to_whole(value)
        if number is None or not self.low <= number <= self.high:
            bounds = f"from {self.low} to {self.high}" if self.low >= -1 else "of 32 bits"
            raise BadRequest(f"{self.name} is {shown(value)}; it must be a whole number {bounds}")
        return number

    def _read_flag(self, value: Any) -> bool:
        flag = value if type(value) is bool else _FLAGS.get(value.strip().lower()) if type(value) is str else None
        if flag is None:
            raise BadRequest(f"{self.name} is {shown(value)}; it must be true or false")
        return flag

    def _read_text(self, value: Any) -> str:
        if type(value) is int:  # unquoted in JSON, as in existing scripts
            value = shown(value)
        if type(value) is not str:
            raise BadRequest(f"{self.name} is {shown(value)}; it must be text")
        if len(value) > self.max_length:
            raise BadRequest(f"{self.name} has {len(value)} characters; it may have {self.max_length}")
        if not self.is_location and _CONTROL.search(value):
            raise BadRequest(f"{self.name} is {shown(value)}; it may hold no control characters")
        return value


def read_parameters(table: Iterable[CallParameter], given: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """The value of each parameter of a call, by name; raises BadRequest. Unknown ones are ignored."""
    if strict:
        return {one.name: one.read(given.get(one.name)) for one in table}
    return {one.name: one.read_leniently(given.get(one.name)) for one in table}


def to_whole(value: Any) -> int | None:
    """A whole number, or its text; None for anything else."""
    is_number = type(value) is int or (type(value) is float and value.is_integer())  # JSON has one type for both
    is_text = type(value) is str and _WHOLE.fullmatch(value.strip())
    return int(value) if is_number or is_text else None


def shown(value: Any) -> str:
    """A value in an error message."""
    if noun := _NOUNS.get(type(value)):
        return noun
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


# ---- the table ----

URL = CallParameter(
    name="url",
    kind="text",
    doc="An archive or folder in the model store, or an allowed URL.",
    max_length=MAX_URL,
    is_required=True,
    keeps_empty=True,
    is_location=True,
)
RESPONSE_TIMEOUT = CallParameter(
    name="response_timeout", kind="whole", low=1, lenient_low=0, doc="Seconds a worker may take to answer."
)
STARTUP_TIMEOUT = CallParameter(
    name="startup_timeout", kind="whole", low=1, lenient_low=0, doc="Seconds a worker may take to load the model."
)
S3_SSE_KMS = CallParameter(
    name="s3_sse_kms", kind="flag", default=False, doc="Sign the download with the server's AWS keys."
)
REGISTER = (
    URL,
    CallParameter(name="model_name", kind="text", doc="Replaces the name in the manifest."),
    CallParameter(name="handler", kind="text", doc="Replaces the handler in the manifest.", max_length=MAX_HANDLER),
    CallParameter(
        name="runtime", kind="text", choices=("python", "python3", "LSP"), doc="Replaces the runtime in the manifest."
    ),
    CallParameter(name="batch_size", kind="whole", low=1, high=MAX_BATCH_SIZE, doc="The most requests run together."),
    CallParameter(name="max_batch_delay", kind="whole", doc="Milliseconds a worker may wait for a batch to fill."),
    RESPONSE_TIMEOUT,
    STARTUP_TIMEOUT,
    CallParameter(
        name="initial_workers", kind="whole", high=MAX_WORKERS, lenient_low=-LARGEST, doc="Workers to start."
    ),
    CallParameter(
        name="synchronous", kind="flag", default=True, doc="Wait until the workers have started; true by default."
    ),
    S3_SSE_KMS,
)
TRAFFIC = (
    CallParameter(
        name="percent",
        kind="whole",
        high=WHOLE,
        doc="The percentage of the requests that name no version; 0 ends the sharing.",
    ),
    CallParameter(
        name="mirror",
        kind="whole",
        high=WHOLE,
        doc="The percentage of the default version's requests that are copied to this version; 0 ends the copies.",
    ),
    CallParameter(
        name="max_errors",
        kind="whole",
        high=WHOLE - 1,
        doc="The version gets no more once this percentage of its last answers are errors of the server (from 500).",
    ),
)
SCALE = (
    CallParameter(
        name="min_worker",
        kind="whole",
        default=1,
        high=MAX_WORKERS,
        lenient_low=-LARGEST,
        doc="The fewest workers; 1 by default.",
    ),
    CallParameter(
        name="max_worker",
        kind="whole",
        high=MAX_WORKERS,
        lenient_low=-LARGEST,
        doc="The most workers; min_worker by default.",
    ),
    CallParameter(name="number_gpu", kind="whole", lenient_low=-LARGEST, doc="Accepted, without effect."),
    CallParameter(name="synchronous", kind="flag", default=False, doc="Wait until the workers have started."),
    CallParameter(name="timeout", kind="whole", low=-1, lenient_low=-LARGEST, doc="Accepted, without effect."),
    CallParameter(name="model_version", kind="text", doc="The version, if the path names none."),
)
DESCRIBE = (CallParameter(name="customized", kind="flag", default=False, doc="Include the handler's own description."),)
LIST = (
    CallParameter(
        name="limit",
        kind="whole",
        default=PAGE,
        low=-LARGEST - 1,  # existing clients send any number: others than 0 to 100 count as 100
        doc="How many models a page may hold; 100 at most.",
    ),
    CallParameter(
        name="next_page_token",
        kind="whole",
        default=0,
        low=-LARGEST - 1,
        is_token=True,
        doc="The token the previous page ended with.",
    ),
)
SLOW = (
    CallParameter(name="model", kind="text", doc="Only requests of this model."),
    CallParameter(name="limit", kind="whole", default=50, low=1, high=500, doc="How many requests; 50 by default."),
)

LORA_NAME = CallParameter(name="lora_name", kind="text", doc="The name of the adapter.", is_required=True)
BASE_MODEL = CallParameter(
    name="model", kind="text", doc="The model that the adapter belongs to; needed if several generate text."
)
LOAD_ADAPTER = (
    LORA_NAME,
    CallParameter(
        name="lora_path",
        kind="text",
        doc="The folder of the adapter, as PEFT saves it, on the server's machine.",
        max_length=MAX_URL,
        is_required=True,
        is_location=True,
    ),
    BASE_MODEL,
)
UNLOAD_ADAPTER = (LORA_NAME, BASE_MODEL)


def registration_of(values: Mapping[str, Any]) -> Registration:
    """The values of REGISTER as a registration."""
    return Registration(
        url=values["url"],
        model_name=values["model_name"],
        handler=values["handler"],
        runtime=values["runtime"],
        batch_size=values["batch_size"],
        max_batch_delay_ms=values["max_batch_delay"],
        response_timeout_s=values["response_timeout"],
        startup_timeout_s=values["startup_timeout"],
        initial_workers=values["initial_workers"],
        synchronous=values["synchronous"],
        s3_sse_kms=values["s3_sse_kms"],
    )


def given_in(table: Iterable[CallParameter], message: Any) -> dict[str, Any]:
    """The parameters of a gRPC message, where empty texts and numbers up to 0 mean "not given"."""
    values = {one.name: getattr(message, one.name) for one in table}
    return {name: value for name, value in values.items() if value != "" and (type(value) is not int or value > 0)}
