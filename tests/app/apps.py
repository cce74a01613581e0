from django.apps import AppConfig


class NotesConfig(AppConfig):
    """An app of a project. Its topics begin with `notes.`"""

    name = "tests.app"
    label = "notes"
    default_auto_field = "django.db.models.BigAutoField"
