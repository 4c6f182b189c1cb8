"""Training runs. The package can be called: `fluvial.engines.train(config, job)` is `trainer.train`.

A folder and a function of one name would hide each other, depending on which was imported first.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from fluvial.engines.train.trainer import train

        return train(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
