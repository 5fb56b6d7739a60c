# The code of an earlier commit on the packages of today's image: what an upgrade starts from.
ARG NEWER
FROM $NEWER
USER root
COPY . /older
RUN pip install --no-cache-dir --no-index --no-deps --no-build-isolation --force-reinstall /older
USER tokenmill
