CREATE SCHEMA allocator;
SET search_path = allocator;
CREATE TABLE reservation (
	id VARCHAR NOT NULL, 
	fence BIGINT NOT NULL, 
	request_id VARCHAR NOT NULL, 
	fingerprint VARCHAR NOT NULL, 
	holder VARCHAR NOT NULL, 
	owner VARCHAR NOT NULL, 
	labels JSON NOT NULL, 
	policy VARCHAR NOT NULL, 
	gpus JSON NOT NULL, 
	state VARCHAR NOT NULL, 
	ttl_seconds FLOAT NOT NULL, 
	deadline_seconds FLOAT NOT NULL, 
	boot_id VARCHAR NOT NULL, 
	create_time FLOAT NOT NULL, 
	end_time FLOAT, 
	tenant VARCHAR NOT NULL, 
	priority BIGINT NOT NULL, 
	preemptible BOOLEAN NOT NULL, 
	cpu_milli BIGINT NOT NULL, 
	host_memory_bytes BIGINT NOT NULL, 
	member_count BIGINT NOT NULL, 
	revoke_seconds FLOAT, 
	end_reason VARCHAR NOT NULL, 
	write_number BIGINT NOT NULL, 
	lasting_sum BIGINT NOT NULL, 
	life_sum BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (fence), 
	UNIQUE (request_id)
);
CREATE TABLE ended (
	id VARCHAR NOT NULL, 
	fence BIGINT NOT NULL, 
	request_id VARCHAR NOT NULL, 
	fingerprint VARCHAR NOT NULL, 
	holder VARCHAR NOT NULL, 
	owner VARCHAR NOT NULL, 
	labels JSON NOT NULL, 
	policy VARCHAR NOT NULL, 
	gpus JSON NOT NULL, 
	state VARCHAR NOT NULL, 
	ttl_seconds FLOAT NOT NULL, 
	deadline_seconds FLOAT NOT NULL, 
	boot_id VARCHAR NOT NULL, 
	create_time FLOAT NOT NULL, 
	end_time FLOAT, 
	tenant VARCHAR NOT NULL, 
	priority BIGINT NOT NULL, 
	preemptible BOOLEAN NOT NULL, 
	cpu_milli BIGINT NOT NULL, 
	host_memory_bytes BIGINT NOT NULL, 
	member_count BIGINT NOT NULL, 
	revoke_seconds FLOAT, 
	end_reason VARCHAR NOT NULL, 
	write_number BIGINT NOT NULL, 
	lasting_sum BIGINT NOT NULL, 
	life_sum BIGINT NOT NULL, 
	PRIMARY KEY (fence), 
	UNIQUE (request_id)
);
CREATE INDEX ended_by_deadline ON ended (boot_id, deadline_seconds);
CREATE INDEX ended_by_holder ON ended (holder, fence);
CREATE INDEX ended_by_id ON ended (id);
CREATE TABLE rank (
	node VARCHAR NOT NULL, 
	rank BIGINT NOT NULL, 
	checksum BIGINT NOT NULL, 
	PRIMARY KEY (node), 
	UNIQUE (rank)
);
CREATE TABLE counter (
	name VARCHAR NOT NULL, 
	value BIGINT NOT NULL, 
	checksum BIGINT NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE hold (
	gpu_uuid VARCHAR NOT NULL, 
	reservation_id VARCHAR NOT NULL, 
	milli BIGINT NOT NULL, 
	PRIMARY KEY (gpu_uuid, reservation_id), 
	FOREIGN KEY(reservation_id) REFERENCES reservation (id)
);
CREATE INDEX ix_hold_reservation_id ON hold (reservation_id);
CREATE UNIQUE INDEX one_whole_hold ON hold (gpu_uuid) WHERE milli = 1000;
CREATE FUNCTION shares_fit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.milli + (SELECT coalesce(sum(milli), 0) FROM hold WHERE gpu_uuid = NEW.gpu_uuid) > 1000 THEN RAISE EXCEPTION 'the GPU is held already' USING ERRCODE = 'check_violation'; END IF; RETURN NEW; END $$;
CREATE TRIGGER shares_fit BEFORE INSERT ON hold FOR EACH ROW EXECUTE FUNCTION shares_fit();
INSERT INTO counter (name, value, checksum) VALUES ('rows', 2, 3080513505);
INSERT INTO counter (name, value, checksum) VALUES ('ended_records', 2, 2276565377);
INSERT INTO counter (name, value, checksum) VALUES ('ended_bytes', 884, 314349232);
INSERT INTO counter (name, value, checksum) VALUES ('fence', 4, 2066223921);
INSERT INTO counter (name, value, checksum) VALUES ('write', 8, 2146185738);
INSERT INTO ended (id, fence, request_id, fingerprint, holder, owner, labels, policy, gpus, state, ttl_seconds, deadline_seconds, boot_id, create_time, end_time, tenant, priority, preemptible, cpu_milli, host_memory_bytes, member_count, revoke_seconds, end_reason, write_number, lasting_sum, life_sum) VALUES ('r1-aa', 1, '11111111-1111-4111-8111-111111111111', 'f', 'job', 'ann', '{"team": "vision \u00e9"}', 'spread', '[{"node":"n0","uuid":"GPU-a","index":0,"model":"Test GPU","simulated":true,"score":1.0,"parts":[],"note":"","milli":1000,"memory":null,"member":0,"lost":false}]', 'released', 60.0, 1210600.0, 'boot-1', 1935817689.0, 1935817689.0, 'ann', 0, false, 0, 0, 1, NULL, '', 2, 3418370241, 2265022042);
INSERT INTO ended (id, fence, request_id, fingerprint, holder, owner, labels, policy, gpus, state, ttl_seconds, deadline_seconds, boot_id, create_time, end_time, tenant, priority, preemptible, cpu_milli, host_memory_bytes, member_count, revoke_seconds, end_reason, write_number, lasting_sum, life_sum) VALUES ('r2-aa', 2, '22111111-1111-4111-8111-111111111111', 'f', 'job', 'ann', '{"team": "vision \u00e9"}', 'spread', '[{"node":"n0","uuid":"GPU-a","index":0,"model":"Test GPU","simulated":true,"score":1.0,"parts":[],"note":"","milli":1000,"memory":null,"member":0,"lost":false}]', 'released', 60.0, 1210601.0, 'boot-1', 1935817689.0, 1935817689.0, 'ann', 0, false, 0, 0, 1, NULL, '', 4, 36388783, 270580608);
INSERT INTO rank (node, rank, checksum) VALUES ('n0', 0, 1369058967);
INSERT INTO reservation (id, fence, request_id, fingerprint, holder, owner, labels, policy, gpus, state, ttl_seconds, deadline_seconds, boot_id, create_time, end_time, tenant, priority, preemptible, cpu_milli, host_memory_bytes, member_count, revoke_seconds, end_reason, write_number, lasting_sum, life_sum) VALUES ('r3-aa', 3, '33111111-1111-4111-8111-111111111111', 'f', 'job', 'ann', '{"team": "vision \u00e9"}', 'spread', '[{"node":"n0","uuid":"GPU-a","index":0,"model":"Test GPU","simulated":true,"score":1.0,"parts":[],"note":"","milli":1000,"memory":null,"member":0,"lost":false}]', 'released', 60.0, 1210602.0, 'boot-1', 1935817689.0, 1935817689.0, 'ann', 0, false, 0, 0, 1, NULL, '', 6, 4087531338, 1867791668);
INSERT INTO reservation (id, fence, request_id, fingerprint, holder, owner, labels, policy, gpus, state, ttl_seconds, deadline_seconds, boot_id, create_time, end_time, tenant, priority, preemptible, cpu_milli, host_memory_bytes, member_count, revoke_seconds, end_reason, write_number, lasting_sum, life_sum) VALUES ('r4-aa', 4, '44111111-1111-4111-8111-111111111111', 'f', 'job', 'ann', '{}', 'spread', '[{"node":"n0","uuid":"GPU-b","index":0,"model":"Test GPU","simulated":true,"score":1.0,"parts":[],"note":"","milli":1000,"memory":null,"member":0,"lost":false},{"node":"n0","uuid":"GPU-c","index":0,"model":"Test GPU","simulated":true,"score":1.0,"parts":[],"note":"","milli":500,"memory":41943040000,"member":0,"lost":false}]', 'active', 60.0, 1060.0, 'boot-1', 1935817689.0, NULL, '', 0, true, 0, 0, 1, NULL, '', 7, 1654166832, 2214280801);
INSERT INTO hold (gpu_uuid, reservation_id, milli) VALUES ('GPU-b', 'r4-aa', 1000);
INSERT INTO hold (gpu_uuid, reservation_id, milli) VALUES ('GPU-c', 'r4-aa', 500);
CREATE TABLE alembic_version (version_num varchar(32) PRIMARY KEY);
INSERT INTO alembic_version VALUES ('8');
