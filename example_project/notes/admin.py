"""Notes in the admin: a change there puts a job, too."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from example_project.notes.jobs import save_and_count
from example_project.notes.models import Note


@admin.register(Note)
class NoteAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("title", "kind", "words")
    list_filter = ("kind",)
    search_fields = ("title",)
    readonly_fields = ("words",)

    def save_model(self, request: HttpRequest, obj: Note, form: Any, change: bool) -> None:
        save_and_count(obj)
