"""OpenAI's API in values: the body of a request becomes the fields of a job, a job's result an
answer, and an error a status with OpenAI's type and code.

Belongs here: what bulk files, a web server and the clients share of it. Lines of files belong to
`bulk.formats`.
"""
