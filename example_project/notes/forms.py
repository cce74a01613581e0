"""What a visitor can send: a note, or a text file that becomes one."""

from __future__ import annotations

from typing import Any

from django import forms

from example_project.notes.models import Note

UPLOAD_BYTES = 5 * 1024 * 1024


class NoteForm(forms.ModelForm):  # type: ignore[type-arg]
    text = forms.CharField(widget=forms.Textarea(attrs={"rows": 12}))

    class Meta:
        model = Note
        fields = ("title", "text", "kind")


class UploadForm(forms.Form):
    file = forms.FileField(
        label="Text file", widget=forms.ClearableFileInput(attrs={"accept": "text/*"})
    )

    def clean_file(self) -> Any:
        file = self.cleaned_data["file"]
        if file.size > UPLOAD_BYTES:
            raise forms.ValidationError("The file is larger than 5 MB.")
        return file

    def note(self) -> Note:
        """Return the note that the valid file is; unsaved."""
        file: Any = self.cleaned_data["file"]
        # PostgreSQL stores no NUL in a text.
        text = file.read().decode(errors="replace").replace("\x00", "\ufffd")
        return Note(title=file.name[:255], text=text)
