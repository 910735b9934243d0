"""What is wrong with a configuration or a request, for people and for code."""

from typing import Self


class ConfigError(ValueError):
    """A configuration or a request that the user can mend; the message says how.

    Command lines print it and exit with 2; services refuse the request.

    Attributes:
      field: the parameter that is wrong, by its name in Python; None where it is not one parameter.
      rule: what is wrong with its value, without the parameter's name; None without `field`.
    """

    def __init__(self, message: str, *, field: str | None = None, rule: str | None = None):
        super().__init__(message)
        self.field, self.rule = field, rule

    @classmethod
    def of(cls, field: str, rule: str) -> Self:
        """The error whose message is "field: rule"."""
        return cls(f"{field}: {rule}", field=field, rule=rule)
