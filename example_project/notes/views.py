"""The pages: a list, and three ways to have a note counted."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.generic import ListView

from example_project.notes.forms import NoteForm, UploadForm
from example_project.notes.jobs import save_and_count
from example_project.notes.models import Note


class NoteList(ListView):  # type: ignore[type-arg]
    queryset = Note.objects.defer("text")
    paginate_by = 50


def write(request: HttpRequest) -> HttpResponse:
    form = NoteForm(request.POST or None)
    if form.is_valid():
        save_and_count(form.save(commit=False))
        return redirect("notes:list")
    return _page(request, form, "Write a note")


def upload(request: HttpRequest) -> HttpResponse:
    form = UploadForm(request.POST or None, request.FILES or None)
    if form.is_valid():
        save_and_count(form.note())
        return redirect("notes:list")
    return _page(request, form, "Upload a text file")


def edit(request: HttpRequest, pk: int) -> HttpResponse:
    form = NoteForm(request.POST or None, instance=get_object_or_404(Note, pk=pk))
    if form.is_valid():
        save_and_count(form.save(commit=False))
        return redirect("notes:list")
    return _page(request, form, "Edit the note")


def _page(request: HttpRequest, form: forms.BaseForm, heading: str) -> HttpResponse:
    context: dict[str, Any] = {"form": form, "heading": heading}
    return render(request, "notes/form.html", context)
