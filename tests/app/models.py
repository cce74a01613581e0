from django.db import models


class Note(models.Model):
    text = models.TextField()
    words = models.IntegerField(null=True)

    def __str__(self) -> str:
        return self.text
