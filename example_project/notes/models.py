"""A note: a text, and how many words it has once its job has run."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class Note(models.Model):
    class Kind(models.TextChoices):
        PLAIN = "plain", "Plain"
        # Its job fails until somebody makes the note a plain one: to see a failed job.
        BROKEN = "broken", "Broken: its words cannot be counted"

    # None for a note that somebody wrote who had not signed in.
    author = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.CASCADE, null=True, blank=True, editable=False
    )
    title = models.CharField(max_length=255)
    text = models.TextField()
    kind = models.CharField(max_length=6, choices=Kind.choices, default=Kind.PLAIN)
    # None until the job has run, and again from an edit until the next one has.
    words = models.PositiveIntegerField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ("-pk",)

    def __str__(self) -> str:
        return self.title
