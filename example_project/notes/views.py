"""The pages: a list, three ways to have a note counted, and what is done for a reader."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.auth import get_user_model
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.views.generic import ListView

from example_project.notes.forms import NoteForm, UploadForm
from example_project.notes.jobs import save_and_count
from example_project.notes.models import Note
from myxo_jobs.services import accepted, enqueue, get_job


class NoteList(ListView):  # type: ignore[type-arg]
    queryset = Note.objects.defer("text")
    paginate_by = 50


def write(request: HttpRequest) -> HttpResponse:
    form = NoteForm(request.POST or None)
    if form.is_valid():
        save_and_count(_by_reader(request, form.save(commit=False)))
        return redirect("notes:list")
    return _page(request, form, "Write a note")


def upload(request: HttpRequest) -> HttpResponse:
    form = UploadForm(request.POST or None, request.FILES or None)
    if form.is_valid():
        save_and_count(_by_reader(request, form.note()))
        return redirect("notes:list")
    return _page(request, form, "Upload a text file")


def edit(request: HttpRequest, pk: int) -> HttpResponse:
    form = NoteForm(request.POST or None, instance=get_object_or_404(Note, pk=pk))
    if form.is_valid():
        save_and_count(form.save(commit=False))
        return redirect("notes:list")
    return _page(request, form, "Edit the note")


@login_required
def exports(request: HttpRequest) -> HttpResponseBase:
    """The reader's exports; a POST puts one, unless one is under way, and leads to its page."""
    if request.method != "POST":
        return render(request, "notes/exports.html")
    name = f"notes of {request.user.get_username()}.csv"
    uid = enqueue("export", {}, owner=request.user, key="all", preferred_name=name)
    return accepted(request, uid)


@login_required
def statistics(request: HttpRequest) -> HttpResponse:
    """A POST has the reader's words counted, and leads to a page that follows it."""
    if request.method != "POST":
        return render(request, "notes/statistics.html")
    uid = enqueue("statistics", {}, owner=request.user, key="all")
    return redirect("notes:statistics_of", uid)


@login_required
def statistics_of(request: HttpRequest, uid: str) -> HttpResponse:
    job = get_job(uid)
    mine = job if job and (job.owner_kind, job.owner_id) == _owner(request) else None
    result = mine.result if mine and mine.status == "done" else None
    return render(request, "notes/statistics.html", {"uid": uid, "result": result})


def _owner(request: HttpRequest) -> tuple[str, str]:
    return get_user_model()._meta.label_lower, str(request.user.pk)


def _by_reader(request: HttpRequest, note: Note) -> Note:
    note.author = request.user if request.user.is_authenticated else None
    return note


def _page(request: HttpRequest, form: forms.BaseForm, heading: str) -> HttpResponse:
    context: dict[str, Any] = {"form": form, "heading": heading}
    return render(request, "notes/form.html", context)
