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
	PRIMARY KEY (node, gpu)
);
INSERT INTO "cordon" VALUES('n0','','fans','bob',1935817689.0,1600.0,600.0,'boot-1');
CREATE TABLE counter (
	name VARCHAR NOT NULL, 
	value INTEGER NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "counter" VALUES('fence',7);
CREATE TABLE hold (
	gpu_uuid VARCHAR NOT NULL, 
	reservation_id VARCHAR NOT NULL, 
	milli INTEGER NOT NULL, 
	PRIMARY KEY (gpu_uuid, reservation_id), 
	FOREIGN KEY(reservation_id) REFERENCES reservation (id)
);
INSERT INTO "hold" VALUES('n0-0','r1-aa',1000);
INSERT INTO "hold" VALUES('n0-1','r1-aa',1000);
INSERT INTO "hold" VALUES('n0-2','r2-aa',500);
CREATE TABLE quota (
	tenant VARCHAR NOT NULL, 
	gpu_milli_limit INTEGER, 
	weight FLOAT NOT NULL, 
	PRIMARY KEY (tenant)
);
INSERT INTO "quota" VALUES('ann',8000,2.0);
CREATE TABLE rank (
	node VARCHAR NOT NULL, 
	rank INTEGER NOT NULL, 
	PRIMARY KEY (node), 
	UNIQUE (rank)
);
INSERT INTO "rank" VALUES('n0',0);
INSERT INTO "rank" VALUES('n1',1);
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
	PRIMARY KEY (id), 
	UNIQUE (fence), 
	UNIQUE (request_id)
);
INSERT INTO "reservation" VALUES('r1-aa',1,'00000000-0000-4000-8000-000000000001','f','job','ann','{"team": "vision \u00e9"}','spread','[{"node": "n0", "uuid": "n0-0", "index": 0, "model": "Test GPU", "simulated": true, "score": 0.92, "parts": [["free_memory", 1.0, 0.6], ["idleness", null, 0.4]], "note": "note", "milli": 1000, "memory": null, "member": 0, "lost": false}, {"node": "n0", "uuid": "n0-1", "index": 1, "model": "Test GPU", "simulated": true, "score": 0.92, "parts": [["free_memory", 1.0, 0.6], ["idleness", null, 0.4]], "note": "note", "milli": 1000, "memory": null, "member": 0, "lost": false}]','active',3600.0,4600.0,'boot-1',1935817689.0,NULL,'ann',3,1,0,0,1,NULL,'');
INSERT INTO "reservation" VALUES('r2-aa',2,'00000000-0000-4000-8000-000000000002','f','job','ann','{"team": "vision \u00e9"}','spread','[{"node": "n0", "uuid": "n0-2", "index": 2, "model": "Test GPU", "simulated": true, "score": 0.92, "parts": [["free_memory", 1.0, 0.6], ["idleness", null, 0.4]], "note": "note", "milli": 500, "memory": 41943040000, "member": 0, "lost": false}]','active',3600.0,4600.0,'boot-1',1935817689.0,NULL,'ann',3,1,0,0,1,1600.0,'nodes/n0 is drained');
INSERT INTO "reservation" VALUES('r3-aa',3,'00000000-0000-4000-8000-000000000003','f','job','ann','{"team": "vision \u00e9"}','spread','[{"node": "n0", "uuid": "n0-3", "index": 3, "model": "Test GPU", "simulated": true, "score": 0.92, "parts": [["free_memory", 1.0, 0.6], ["idleness", null, 0.4]], "note": "note", "milli": 1000, "memory": null, "member": 0, "lost": false}]','released',3600.0,87405.0,'boot-1',1935817689.0,1935817689.0,'ann',3,1,0,0,1,NULL,'');
CREATE UNIQUE INDEX one_whole_hold ON hold (gpu_uuid) WHERE milli = 1000;
CREATE INDEX ix_hold_reservation_id ON hold (reservation_id);
CREATE TRIGGER shares_fit BEFORE INSERT ON hold WHEN NEW.milli + (SELECT coalesce(sum(milli), 0) FROM hold WHERE gpu_uuid = NEW.gpu_uuid) > 1000 BEGIN SELECT RAISE(ABORT, 'the GPU is held already'); END;
PRAGMA user_version = 2;
COMMIT;
