"""What `manage.py demo` is made of.

files       which texts it takes
database    a database of its own, beside the site's
workers     the `runjobs` processes it starts and kills
run         the run itself: put, work, kill, take over
outcome     what is true afterwards, and whether it is what was promised
screen      what the reader sees
"""
