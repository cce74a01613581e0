"""The addresses of jobs, for a project to include: `include("myxo_jobs.services.urls")`."""

from django.urls import path

from myxo_jobs.services import views

app_name = "myxo_jobs"
# A text, not a uuid: what is no uid is answered as one that there is not.
urlpatterns = [
    path("", views.jobs, name="list"),
    path("<str:uid>/", views.job, name="job"),
    path("<str:uid>/download/", views.download, name="download"),
    path("<str:uid>/cancel/", views.cancel, name="cancel"),
    path("<str:uid>/delete/", views.delete, name="delete"),
]
