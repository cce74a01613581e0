"""A project that includes the addresses of its jobs, and views of its own beside them."""

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.template import engines
from django.urls import include, path

from myxo_jobs.services import accepted, enqueue, file_response, get_job, status_response


def export(request: HttpRequest) -> HttpResponseBase:
    return accepted(request, enqueue("export", {}, owner=request.user, key="all"))


def own_status(request: HttpRequest, uid: str) -> HttpResponseBase:
    job = get_job(uid)
    assert job is not None
    return status_response(request, job)


def own_download(request: HttpRequest, uid: str) -> HttpResponseBase:
    job = get_job(uid)
    assert job is not None
    return file_response(request, job)


PAGE = """
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>A page of the project</title></head>
<body><main><h1>A page of the project</h1>
{% load myxo_jobs %}
{% if uid %}{% job_progress uid then=then %}{% endif %}
{% if other %}{% job_progress other %}{% endif %}
{% if kind %}{% job_list kind %}{% endif %}
</main></body></html>
"""


def own_page(request: HttpRequest) -> HttpResponse:
    context = {name: request.GET.get(name, "") for name in ("uid", "then", "other", "kind")}
    return HttpResponse(engines["django"].from_string(PAGE).render(context, request))


urlpatterns = [
    path("admin/", admin.site.urls),
    path("jobs/", include("myxo_jobs.services.urls")),
    path("export/", export),
    path("own/", own_page),
    path("own/<str:uid>/", own_status),
    path("own/<str:uid>/file/", own_download),
]
