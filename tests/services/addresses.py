"""Stands where a project includes the addresses of its jobs."""

from django.http import HttpResponse
from django.urls import include, path

jobs = ([path("<uuid:uid>/", lambda request, uid: HttpResponse(str(uid)), name="job")], "myxo_jobs")

urlpatterns = [path("jobs/", include(jobs))]
