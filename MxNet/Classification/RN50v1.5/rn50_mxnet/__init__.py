"""ResNet v1, v1.5, ResNeXt and Xception in MXNet 1.9.1; the README says who should still use it."""

from .threads import use_every_core

use_every_core()
