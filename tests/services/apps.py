from django.apps import AppConfig


class ServicesConfig(AppConfig):
    """An app whose services run in the processes of a test."""

    name = "tests.services"
    label = "services"
