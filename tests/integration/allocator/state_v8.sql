BEGIN TRANSACTION;
CREATE TABLE cordon (
	node VARCHAR NOT NULL, 
	gpu VARCHAR NOT NULL, 
	reason VARCHAR NOT NULL, 
	author VARCHAR NOT NULL, 
	create_time FLOAT NOT NULL, 
	deadline_seconds FLOAT, 
	grace_seconds FLOAT, 
	boot_id VARCHAR NOT NULL, 
	checksum INTEGER NOT NULL, 
	PRIMARY KEY (node, gpu)
);
CREATE TABLE counter (
	name VARCHAR NOT NULL, 
	value INTEGER NOT NULL, 
	checksum INTEGER NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "counter" VALUES('rows',2,3080513505);
INSERT INTO "counter" VALUES('ended_records',2,2276565377);
INSERT INTO "counter" VALUES('ended_bytes',884,314349232);
INSERT INTO "counter" VALUES('fence',4,2066223921);
INSERT INTO "counter" VALUES('write',8,2146185738);
CREATE TABLE ended (
	id VARCHAR NOT NULL, 
	fence INTEGER NOT NULL, 
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
	priority INTEGER NOT NULL, 
	preemptible BOOLEAN NOT NULL, 
	cpu_milli INTEGER NOT NULL, 
	host_memory_bytes INTEGER NOT NULL, 
	member_count INTEGER NOT NULL, 
	revoke_seconds FLOAT, 
	end_reason VARCHAR NOT NULL, 
	write_number INTEGER NOT NULL, 
	lasting_sum INTEGER NOT NULL, 
	life_sum INTEGER NOT NULL, 
	PRIMARY KEY (fence), 
	UNIQUE (request_id)
);
INSERT INTO "ended" VALUES('r1-aa',1,'11111111-1111-4111-8111-111111111111','f','job','ann','{"team": "vision \u00e9"}','spread','[{"node":"n0","uuid":"GPU-a","index":0,"model":"Test GPU","simulated":true,"score":1.0,"parts":[],"note":"","milli":1000,"memory":null,"member":0,"lost":false}]','released',60.0,1210600.0,'boot-1',1935817689.0,1935817689.0,'ann',0,0,0,0,1,NULL,'',2,3418370241,2265022042);
INSERT INTO "ended" VALUES('r2-aa',2,'22111111-1111-4111-8111-111111111111','f','job','ann','{"team": "vision \u00e9"}','spread','[{"node":"n0","uuid":"GPU-a","index":0,"model":"Test GPU","simulated":true,"score":1.0,"parts":[],"note":"","milli":1000,"memory":null,"member":0,"lost":false}]','released',60.0,1210601.0,'boot-1',1935817689.0,1935817689.0,'ann',0,0,0,0,1,NULL,'',4,36388783,270580608);
CREATE TABLE hold (
	gpu_uuid VARCHAR NOT NULL, 
	reservation_id VARCHAR NOT NULL, 
	milli INTEGER NOT NULL, 
	PRIMARY KEY (gpu_uuid, reservation_id), 
	FOREIGN KEY(reservation_id) REFERENCES reservation (id)
);
INSERT INTO "hold" VALUES('GPU-b','r4-aa',1000);
INSERT INTO "hold" VALUES('GPU-c','r4-aa',500);
CREATE TABLE quota (
	tenant VARCHAR NOT NULL, 
	gpu_milli_limit INTEGER, 
	weight FLOAT NOT NULL, 
	checksum INTEGER NOT NULL, 
	PRIMARY KEY (tenant)
);
CREATE TABLE rank (
	node VARCHAR NOT NULL, 
	rank INTEGER NOT NULL, 
	checksum INTEGER NOT NULL, 
	PRIMARY KEY (node), 
	UNIQUE (rank)
);
INSERT INTO "rank" VALUES('n0',0,1369058967);
CREATE TABLE reservation (
	id VARCHAR NOT NULL, 
	fence INTEGER NOT NULL, 
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
	priority INTEGER NOT NULL, 
	preemptible BOOLEAN NOT NULL, 
	cpu_milli INTEGER NOT NULL, 
	host_memory_bytes INTEGER NOT NULL, 
	member_count INTEGER NOT NULL, 
	revoke_seconds FLOAT, 
	end_reason VARCHAR NOT NULL, 
	write_number INTEGER NOT NULL, 
	lasting_sum INTEGER NOT NULL, 
	life_sum INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (fence), 
	UNIQUE (request_id)
);
INSERT INTO "reservation" VALUES('r3-aa',3,'33111111-1111-4111-8111-111111111111','f','job','ann','{"team": "vision \u00e9"}','spread','[{"node":"n0","uuid":"GPU-a","index":0,"model":"Test GPU","simulated":true,"score":1.0,"parts":[],"note":"","milli":1000,"memory":null,"member":0,"lost":false}]','released',60.0,1210602.0,'boot-1',1935817689.0,1935817689.0,'ann',0,0,0,0,1,NULL,'',6,4087531338,1867791668);
INSERT INTO "reservation" VALUES('r4-aa',4,'44111111-1111-4111-8111-111111111111','f','job','ann','{}','spread','[{"node":"n0","uuid":"GPU-b","index":0,"model":"Test GPU","simulated":true,"score":1.0,"parts":[],"note":"","milli":1000,"memory":null,"member":0,"lost":false},{"node":"n0","uuid":"GPU-c","index":0,"model":"Test GPU","simulated":true,"score":1.0,"parts":[],"note":"","milli":500,"memory":41943040000,"member":0,"lost":false}]','active',60.0,1060.0,'boot-1',1935817689.0,NULL,'',0,1,0,0,1,NULL,'',7,1654166832,2214280801);
CREATE TABLE usage (
	reservation_id VARCHAR NOT NULL, 
	part INTEGER NOT NULL, 
	gpu_uuid VARCHAR NOT NULL, 
	day INTEGER NOT NULL, 
	owner VARCHAR NOT NULL, 
	tenant VARCHAR NOT NULL, 
	holder VARCHAR NOT NULL, 
	labels VARCHAR NOT NULL, 
	node VARCHAR NOT NULL, 
	model VARCHAR NOT NULL, 
	milli INTEGER NOT NULL, 
	granted INTEGER NOT NULL, 
	busy INTEGER NOT NULL, 
	idle INTEGER NOT NULL, 
	read INTEGER NOT NULL, 
	utilization FLOAT NOT NULL, 
	peak_utilization FLOAT, 
	peak_memory INTEGER, 
	energy FLOAT, 
	ends INTEGER NOT NULL, 
	outcome VARCHAR NOT NULL, 
	until_ms INTEGER NOT NULL, 
	boot_id VARCHAR NOT NULL, 
	hardware VARCHAR NOT NULL, 
	PRIMARY KEY (reservation_id, part, gpu_uuid)
);
CREATE INDEX ended_by_deadline ON ended (boot_id, deadline_seconds);
CREATE INDEX ended_by_holder ON ended (holder, fence);
CREATE INDEX ended_by_id ON ended (id);
CREATE INDEX usage_by_day ON usage (day);
CREATE INDEX ix_hold_reservation_id ON hold (reservation_id);
CREATE UNIQUE INDEX one_whole_hold ON hold (gpu_uuid) WHERE milli = 1000;
CREATE TRIGGER shares_fit BEFORE INSERT ON hold WHEN NEW.milli + (SELECT coalesce(sum(milli), 0) FROM hold WHERE gpu_uuid = NEW.gpu_uuid) > 1000 BEGIN SELECT RAISE(ABORT, 'the GPU is held already'); END;
PRAGMA user_version = 8;
COMMIT;
