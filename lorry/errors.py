"""The exceptions Lorry raises for what comes from users, files and the network, and their HTTP status.

LorryError                     500  anything below
├── InvalidRequest             400  a request asks for something that cannot be done
│   └── ContextLengthExceeded  400  prompt and answer do not fit in the context
├── ModelNotFound              404  no base or adapter of that name
├── AdapterError               400  an adapter cannot be loaded
│   ├── AdapterFormatError     400  its files are missing, damaged, or hold something that is not served
│   ├── AdapterMismatch        400  its shapes do not fit the base model
│   ├── AdapterExists          400  the name is taken
│   └── AdapterCapacity        400  no room: bytes, slots or the rank limit
├── UnsupportedModel           400  the base model would be served wrongly, so it is refused
├── ConfigError                400  a setting is out of range or contradicts another
└── EngineUnavailable          503  the engine process is starting or has died
"""

from __future__ import annotations

from typing import ClassVar


class LorryError(Exception):
    """Base of all errors of this package; `status` is the HTTP status and `code` the machine-readable name."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"


class InvalidRequest(LorryError):
    """A request asks for something that cannot be done; `param` names the field, where one is to blame."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(LorryError):
    status = 404
    code = "model_not_found"


class AdapterError(LorryError):
    status = 400
    code = "adapter_error"


class AdapterFormatError(AdapterError):
    code = "adapter_format_error"


class AdapterMismatch(AdapterError):
    code = "adapter_mismatch"


class AdapterExists(AdapterError):
    code = "adapter_exists"


class AdapterCapacity(AdapterError):
    code = "adapter_capacity"


class UnsupportedModel(LorryError):
    status = 400
    code = "unsupported_model"


class ConfigError(LorryError):
    status = 400
    code = "config_error"


class EngineUnavailable(LorryError):
    status = 503
    code = "engine_unavailable"


def _tree(root: type[LorryError]) -> dict[str, type[LorryError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def from_code(code: str, message: str) -> LorryError:
    """The error that `code` names, as it was raised in another process."""
    return _tree(LorryError).get(code, LorryError)(message)
