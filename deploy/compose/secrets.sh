#!/bin/sh
# Makes the passwords of docker-compose.yml, and the files that its services read them from:
#
#   sh deploy/compose/secrets.sh [FOLDER]        (in the root of the repository; FOLDER is ./secrets without one)
#
# What is there already stays, since the database and the broker know it. POSTGRES_PASSWORD and RABBITMQ_PASSWORD, where
# they are set, are taken instead of new ones; both must not need to be quoted in a URL.
#
# Services run as users of their own, which the engine does not give these files to: so every user may read the files, and
# only you may enter their folder. In a container there are those of its service alone.
set -eu
umask 022
folder=${1:-secrets}
mkdir -p -m 700 "$folder"
chmod 700 "$folder"
cd "$folder"
if [ ! -e postgres_password ]; then
    password=${POSTGRES_PASSWORD:-$(openssl rand -hex 16)}
    printf 'postgresql://gpuscale:%s@postgres:5432/gpuscale' "$password" >database_url
    printf '%s' "$password" >postgres_password
fi
if [ ! -e rabbitmq.conf ]; then
    password=${RABBITMQ_PASSWORD:-$(openssl rand -hex 16)}
    printf 'amqp://gpuscale:%s@rabbitmq:5672/' "$password" >amqp_url
    printf 'http://gpuscale:%s@rabbitmq:15672' "$password" >management_url
    printf 'default_user = gpuscale\ndefault_pass = %s\n' "$password" >rabbitmq.conf
fi
