"""Notes: texts whose words a job counts."""

from django.apps import AppConfig


class NotesConfig(AppConfig):
    name = "example_project.notes"
