"""matplotlib, imported only where something is drawn: serving and generation do not need it."""

from importlib.util import find_spec
from types import ModuleType

from peagle_jax.errors import ConfigError

MISSING = (
    "plots need matplotlib, which is not installed; python -m pip install 'peagle-jax[plots]', "
    "or in a clone python -m pip install -e '.[plots]'"
)


def installed() -> bool:
    return find_spec("matplotlib") is not None


def matplotlib() -> ModuleType:
    """The library, with `matplotlib.figure`.

    Raises:
      ConfigError: it is not installed; the message says how to install it.
    """
    if not installed():
        raise ConfigError(MISSING)
    import matplotlib.figure

    return matplotlib


def figure_with_panels(count: int) -> tuple:
    """A figure with `count` panels side by side, and the list of its panels.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    figure = matplotlib().figure.Figure(figsize=(5 * count, 4), layout="constrained")  # inches
    return figure, list(figure.subplots(1, count, squeeze=False)[0])
