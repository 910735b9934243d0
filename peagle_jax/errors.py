"""The error type for invalid configurations and requests."""

from typing import Self


class NotReady(RuntimeError):
    """An engine cannot do this in its present state; the message says what comes first."""


class ConfigError(ValueError):
    """Invalid configuration or request. The message tells the user what to change.

    Command lines print it and exit with code 2; servers reject the request.

    Attributes:
      field: Python name of the invalid parameter; None if the error is not about one parameter.
      rule: the violated rule, without the parameter's name; None without `field`.
    """

    def __init__(self, message: str, *, field: str | None = None, rule: str | None = None):
        super().__init__(message)
        self.field, self.rule = field, rule

    @classmethod
    def of(cls, field: str, rule: str) -> Self:
        """The error whose message is "field: rule"."""
        return cls(f"{field}: {rule}", field=field, rule=rule)
