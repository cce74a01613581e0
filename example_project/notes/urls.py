"""The addresses of the notes."""

from django.urls import path

from example_project.notes import views

app_name = "notes"
urlpatterns = [
    path("", views.NoteList.as_view(), name="list"),
    path("write/", views.write, name="write"),
    path("upload/", views.upload, name="upload"),
    path("<int:pk>/", views.edit, name="edit"),
    path("exports/", views.exports, name="exports"),
    path("statistics/", views.statistics, name="statistics"),
    path("statistics/<str:uid>/", views.statistics_of, name="statistics_of"),
]
