BEGIN TRANSACTION;
CREATE TABLE counter (
	name VARCHAR NOT NULL, 
	value INTEGER NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE hold (
	gpu_uuid VARCHAR NOT NULL, 
	reservation_id VARCHAR NOT NULL, 
	PRIMARY KEY (gpu_uuid), 
	FOREIGN KEY(reservation_id) REFERENCES reservation (id)
);
INSERT INTO "hold" VALUES('n0-0','r1-aa');
INSERT INTO "hold" VALUES('n0-1','r1-aa');
CREATE TABLE rank (
	node VARCHAR NOT NULL, 
	rank INTEGER NOT NULL, 
	PRIMARY KEY (node), 
	UNIQUE (rank)
);
INSERT INTO "rank" VALUES('n0',0);
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
	PRIMARY KEY (id), 
	UNIQUE (fence), 
	UNIQUE (request_id)
);
INSERT INTO "reservation" VALUES('r1-aa',1,'11111111-1111-4111-8111-111111111111','f','job','ann','{}','spread','[{"node": "n0", "uuid": "n0-0", "index": 0, "model": "Test GPU", "simulated": true, "score": 1.0, "parts": [], "note": ""}, {"node": "n0", "uuid": "n0-1", "index": 1, "model": "Test GPU", "simulated": true, "score": 1.0, "parts": [], "note": ""}]','active',3600.0,4600.0,'boot-1',1935817689.0,NULL);
INSERT INTO "reservation" VALUES('r2-aa',2,'22222222-2222-4222-8222-222222222222','f','job','ann','{}','spread','[{"node": "n0", "uuid": "n0-2", "index": 2, "model": "Test GPU", "simulated": true, "score": 1.0, "parts": [], "note": ""}]','released',60.0,87400.0,'boot-1',1935817689.0,1935817689.0);
CREATE INDEX ix_hold_reservation_id ON hold (reservation_id);
PRAGMA user_version = 1;
COMMIT;
