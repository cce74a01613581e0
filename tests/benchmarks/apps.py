from django.apps import AppConfig


class BenchmarksConfig(AppConfig):
    """An app whose handlers do next to nothing, so that the queue is what is measured."""

    name = "tests.benchmarks"
    label = "benchmarks"
