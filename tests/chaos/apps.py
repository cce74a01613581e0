import os

from django.apps import AppConfig


class ChaosConfig(AppConfig):
    """The app of the suite. Its topics begin with `chaos.`"""

    name = "tests.chaos"
    label = "chaos"

    def ready(self) -> None:
        if name := os.environ.get("MYXO_CHAOS_WITHOUT"):
            from tests.chaos.controls import CONTROLS

            CONTROLS[name].switch_off()
