BEGIN TRANSACTION;
CREATE TABLE drains (
	id INTEGER NOT NULL, 
	job_id INTEGER NOT NULL, 
	node TEXT NOT NULL, 
	step TEXT NOT NULL, 
	outcome TEXT, 
	reason TEXT NOT NULL, 
	drained_at DATETIME NOT NULL, 
	undrained_at DATETIME, 
	CONSTRAINT pk_drains PRIMARY KEY (id), 
	CONSTRAINT fk_drains_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
CREATE TABLE events (
	job_id INTEGER NOT NULL, 
	seq BIGINT NOT NULL, 
	at DATETIME NOT NULL, 
	kind TEXT NOT NULL, 
	text TEXT NOT NULL, 
	iteration BIGINT, 
	epoch INTEGER, 
	rank INTEGER, 
	node TEXT, 
	CONSTRAINT pk_events PRIMARY KEY (job_id, seq), 
	CONSTRAINT fk_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "events" VALUES(1,1,'2025-06-15 15:06:40.000000','JobStarted','job local-1: started on here with 3 nodes of 4, TP2 x PP2',NULL,NULL,NULL,NULL);
INSERT INTO "events" VALUES(1,2,'2025-06-15 15:06:40.100000','NodeJoined','node n1: joined on here with 4 devices',NULL,NULL,NULL,'n1');
INSERT INTO "events" VALUES(1,3,'2025-06-15 15:06:40.200000','WorkerStarted','rank 0: started on n1 device 0, pid 1000',NULL,0,0,'n1');
INSERT INTO "events" VALUES(1,4,'2025-06-15 15:06:40.200000','WorkerStarted','rank 1: started on n1 device 1, pid 1001',NULL,0,1,'n1');
INSERT INTO "events" VALUES(1,5,'2025-06-15 15:06:40.200000','WorkerStarted','rank 2: started on n1 device 2, pid 1002',NULL,0,2,'n1');
INSERT INTO "events" VALUES(1,6,'2025-06-15 15:06:40.200000','WorkerStarted','rank 3: started on n1 device 3, pid 1003',NULL,0,3,'n1');
INSERT INTO "events" VALUES(1,7,'2025-06-15 15:06:40.100000','NodeJoined','node n2: joined on here with 4 devices',NULL,NULL,NULL,'n2');
INSERT INTO "events" VALUES(1,8,'2025-06-15 15:06:40.200000','WorkerStarted','rank 4: started on n2 device 0, pid 1004',NULL,0,4,'n2');
INSERT INTO "events" VALUES(1,9,'2025-06-15 15:06:40.200000','WorkerStarted','rank 5: started on n2 device 1, pid 1005',NULL,0,5,'n2');
INSERT INTO "events" VALUES(1,10,'2025-06-15 15:06:40.200000','WorkerStarted','rank 6: started on n2 device 2, pid 1006',NULL,0,6,'n2');
INSERT INTO "events" VALUES(1,11,'2025-06-15 15:06:40.200000','WorkerStarted','rank 7: started on n2 device 3, pid 1007',NULL,0,7,'n2');
INSERT INTO "events" VALUES(1,12,'2025-06-15 15:06:40.100000','NodeJoined','node n3: joined on here with 4 devices',NULL,NULL,NULL,'n3');
INSERT INTO "events" VALUES(1,13,'2025-06-15 15:06:40.200000','WorkerStarted','rank 8: started on n3 device 0, pid 1008',NULL,0,8,'n3');
INSERT INTO "events" VALUES(1,14,'2025-06-15 15:06:40.200000','WorkerStarted','rank 9: started on n3 device 1, pid 1009',NULL,0,9,'n3');
INSERT INTO "events" VALUES(1,15,'2025-06-15 15:06:40.200000','WorkerStarted','rank 10: started on n3 device 2, pid 1010',NULL,0,10,'n3');
INSERT INTO "events" VALUES(1,16,'2025-06-15 15:06:40.200000','WorkerStarted','rank 11: started on n3 device 3, pid 1011',NULL,0,11,'n3');
INSERT INTO "events" VALUES(1,17,'2025-06-15 15:06:42.000000','PlanDecided','epoch 1: DP3 x PP2 x TP2, iteration 1 starts: start',1,1,NULL,NULL);
INSERT INTO "events" VALUES(1,20,'2025-06-15 15:06:43.300000','WorkerEnded','rank 5: killed by signal 9',NULL,1,5,NULL);
INSERT INTO "events" VALUES(1,21,'2025-06-15 15:06:43.400000','FailureFound','failure 1: rank 5 (n2 device 1) killed by signal 9 (SIGKILL), noticed in iteration 3',3,2,5,'n2');
INSERT INTO "events" VALUES(1,22,'2025-06-15 15:06:43.400000','PlanDecided','epoch 2: DP2 x PP2 x TP2 + 3 standby, iteration 3 redone: rank 5 killed',3,2,NULL,NULL);
INSERT INTO "events" VALUES(1,23,'2025-06-15 15:06:43.450000','WorkerEnded','rank 0: killed by signal 9',NULL,2,0,NULL);
INSERT INTO "events" VALUES(1,24,'2025-06-15 15:06:43.500000','PlanDecided','epoch 3: DP1 x PP2 x TP2 + 6 standby, iteration 3 redone: rank 0 killed',3,3,NULL,NULL);
INSERT INTO "events" VALUES(1,26,'2025-06-15 15:06:44.300000','Reconfigured','epoch 3: recovered from failure 1 in 1.00 s after 2 attempts',NULL,3,NULL,NULL);
INSERT INTO "events" VALUES(1,27,'2025-06-15 15:06:44.500000','JobEnded','job: completed, exit code 0, 3 iterations done',NULL,NULL,NULL,NULL);
CREATE TABLE failures (
	job_id INTEGER NOT NULL, 
	failure INTEGER NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	component VARCHAR(16) NOT NULL, 
	cause TEXT NOT NULL, 
	ranks TEXT NOT NULL, 
	node TEXT, 
	device INTEGER, 
	iteration BIGINT NOT NULL, 
	epoch INTEGER NOT NULL, 
	noticed_at DATETIME NOT NULL, 
	detect_seconds FLOAT, 
	recovered_epoch INTEGER, 
	evidence TEXT NOT NULL, 
	CONSTRAINT pk_failures PRIMARY KEY (job_id, failure), 
	CONSTRAINT ck_failures_component CHECK (component IN ('process', 'device', 'node', 'link', 'script')), 
	CONSTRAINT ck_failures_kind CHECK (kind IN ('fail-stop', 'communication', 'program')), 
	CONSTRAINT fk_failures_job_id_recovered_epoch FOREIGN KEY(job_id, recovered_epoch) REFERENCES reconfigurations (job_id, epoch), 
	CONSTRAINT fk_failures_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "failures" VALUES(1,1,'fail-stop','process','rank 5 killed by signal 9 (SIGKILL)','[5]','n2',1,3,2,'2025-06-15 15:06:43.300000',0.02,3,'pid 1005');
CREATE TABLE iterations (
	job_id INTEGER NOT NULL, 
	iteration BIGINT NOT NULL, 
	epoch INTEGER NOT NULL, 
	seconds FLOAT, 
	predicted_seconds FLOAT, 
	tokens BIGINT NOT NULL, 
	sum_squared_lengths BIGINT NOT NULL, 
	samples BIGINT NOT NULL, 
	samples_digest VARCHAR(16) NOT NULL, 
	loss FLOAT, 
	finished_at DATETIME NOT NULL, 
	gradient_norm FLOAT, 
	learning_rate FLOAT, 
	skipped BOOLEAN NOT NULL, 
	CONSTRAINT pk_iterations PRIMARY KEY (job_id, iteration), 
	CONSTRAINT ck_iterations_iteration CHECK (iteration >= 1), 
	CONSTRAINT ck_iterations_seconds CHECK (seconds >= 0), 
	CONSTRAINT fk_iterations_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "iterations" VALUES(1,1,1,0.5,NULL,8192,1099511627776,17,'00ff00ff00ff00ff',3.9,'2025-06-15 15:06:42.500000',2.0,0.001,0);
INSERT INTO "iterations" VALUES(1,2,1,0.5,NULL,8192,1099511627776,17,'00ff00ff00ff00ff',3.8,'2025-06-15 15:06:43.000000',2.0,0.001,0);
INSERT INTO "iterations" VALUES(1,3,3,0.6,NULL,8192,1099511627776,17,'00ff00ff00ff00ff',3.7,'2025-06-15 15:06:44.300000',2.0,0.001,0);
CREATE TABLE jobs (
	id INTEGER NOT NULL, 
	uuid VARCHAR(36) NOT NULL, 
	name TEXT NOT NULL, 
	host TEXT NOT NULL, 
	owner TEXT NOT NULL, 
	command TEXT NOT NULL, 
	nodes INTEGER NOT NULL, 
	gpus_per_node INTEGER NOT NULL, 
	tp INTEGER NOT NULL, 
	pp INTEGER NOT NULL, 
	schedule TEXT NOT NULL, 
	restart_count INTEGER NOT NULL, 
	version TEXT NOT NULL, 
	configuration TEXT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	exit_code INTEGER, 
	reason TEXT, 
	started_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	last_entry_at DATETIME NOT NULL, 
	journal_seq BIGINT NOT NULL, 
	telemetry_dropped BIGINT NOT NULL, 
	CONSTRAINT pk_jobs PRIMARY KEY (id), 
	CONSTRAINT ck_jobs_state CHECK (state IN ('running', 'completed', 'failed', 'cancelled', 'abnormal')), 
	CONSTRAINT ck_jobs_journal_seq CHECK (journal_seq >= 0), 
	CONSTRAINT uq_jobs_uuid UNIQUE (uuid)
);
INSERT INTO "jobs" VALUES(1,'8ac3b804-9966-5227-8aeb-cd570c2052e8','local-1','here','me','["python", "train.py", "--title", "a \"b\" [red]c"]',3,4,2,2,'1f1b',0,'0.1.0','{"layout": {"tp": 2}}','completed',0,'3 iterations done','2025-06-15 15:06:40.000000','2025-06-15 15:06:44.500000','2025-06-15 15:06:44.500000',27,0);
CREATE TABLE nodes (
	job_id INTEGER NOT NULL, 
	node TEXT NOT NULL, 
	host TEXT NOT NULL, 
	devices INTEGER NOT NULL, 
	joined_at DATETIME NOT NULL, 
	lost_at DATETIME, 
	lost_reason TEXT, 
	CONSTRAINT pk_nodes PRIMARY KEY (job_id, node), 
	CONSTRAINT fk_nodes_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "nodes" VALUES(1,'n1','here',4,'2025-06-15 15:06:40.100000',NULL,NULL);
INSERT INTO "nodes" VALUES(1,'n2','here',4,'2025-06-15 15:06:40.100000',NULL,NULL);
INSERT INTO "nodes" VALUES(1,'n3','here',4,'2025-06-15 15:06:40.100000',NULL,NULL);
CREATE TABLE plans (
	job_id INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	action VARCHAR(16) NOT NULL, 
	next_iteration BIGINT NOT NULL, 
	description TEXT NOT NULL, 
	replicas INTEGER NOT NULL, 
	active INTEGER NOT NULL, 
	standby INTEGER NOT NULL, 
	schedule TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	decided_at DATETIME NOT NULL, 
	layout TEXT NOT NULL, 
	assignment TEXT NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_plans PRIMARY KEY (job_id, epoch), 
	CONSTRAINT ck_plans_action CHECK (action IN ('start', 'redo', 'commit')), 
	CONSTRAINT fk_plans_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "plans" VALUES(1,1,'start',1,'DP3 x PP2 x TP2',3,12,0,'1f1b','start','2025-06-15 15:06:42.000000','{"replicas":[[{"ranks":[0,1],"layers":[0,3]},{"ranks":[2,3],"layers":[4,7]}],[{"ranks":[4,5],"layers":[0,3]},{"ranks":[6,7],"layers":[4,7]}],[{"ranks":[8,9],"layers":[0,3]},{"ranks":[10,11],"layers":[4,7]}]],"standby":[]}','[[0,1,2,3],[4,5,6,7],[8,9,10,11]]','bf5001dc6b1767e248401c2892e1652635839c382c9714834dc1702a07816951');
INSERT INTO "plans" VALUES(1,2,'redo',3,'DP2 x PP2 x TP2 + 3 standby',2,8,3,'1f1b','rank 5 killed','2025-06-15 15:06:43.400000','{"replicas":[[{"ranks":[0,1],"layers":[0,3]},{"ranks":[2,3],"layers":[4,7]}],[{"ranks":[8,9],"layers":[0,3]},{"ranks":[10,11],"layers":[4,7]}]],"standby":[4,6,7]}','[[0,1,2,3,4,5],[6,7,8,9,10,11]]','b52e35f98712b1725775c5e6094a2798c7294b689bddeb221a7ae00af17ef8e4');
INSERT INTO "plans" VALUES(1,3,'redo',3,'DP1 x PP2 x TP2 + 6 standby',1,4,6,'1f1b','rank 0 killed','2025-06-15 15:06:43.500000','{"replicas":[[{"ranks":[8,9],"layers":[0,3]},{"ranks":[10,11],"layers":[4,7]}]],"standby":[1,2,3,4,6,7]}','[[0,1,2,3,4,5,6,7,8,9,10,11]]','f8200dfc4c3b1b4f6858092594bee6af6007de6583b5dff76e472dd74efa7c92');
CREATE TABLE probes (
	id INTEGER NOT NULL, 
	job_id INTEGER NOT NULL, 
	node TEXT NOT NULL, 
	device INTEGER, 
	kind TEXT NOT NULL, 
	passed BOOLEAN, 
	seconds FLOAT, 
	evidence TEXT NOT NULL, 
	started_at DATETIME NOT NULL, 
	CONSTRAINT pk_probes PRIMARY KEY (id), 
	CONSTRAINT fk_probes_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
CREATE TABLE rank_reports (
	id INTEGER NOT NULL, 
	job_id INTEGER NOT NULL, 
	iteration BIGINT NOT NULL, 
	epoch INTEGER NOT NULL, 
	rank INTEGER NOT NULL, 
	seconds FLOAT, 
	compute_seconds FLOAT, 
	CONSTRAINT pk_rank_reports PRIMARY KEY (id), 
	CONSTRAINT fk_rank_reports_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
CREATE TABLE reconfigurations (
	job_id INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	action VARCHAR(16) NOT NULL, 
	attempts INTEGER NOT NULL, 
	seconds FLOAT NOT NULL, 
	park_seconds FLOAT NOT NULL, 
	plan_seconds FLOAT NOT NULL, 
	groups_seconds FLOAT NOT NULL, 
	state_seconds FLOAT NOT NULL, 
	first_iteration_seconds FLOAT NOT NULL, 
	finished_at DATETIME NOT NULL, 
	CONSTRAINT pk_reconfigurations PRIMARY KEY (job_id, epoch), 
	CONSTRAINT ck_reconfigurations_action CHECK (action IN ('redo', 'commit')), 
	CONSTRAINT ck_reconfigurations_attempts CHECK (attempts >= 1), 
	CONSTRAINT fk_reconfigurations_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "reconfigurations" VALUES(1,3,'redo',2,1.0,0.1,0.05,0.2,0.05,0.6,'2025-06-15 15:06:44.300000');
CREATE TABLE replacements (
	id INTEGER NOT NULL, 
	job_id INTEGER NOT NULL, 
	slurm_job TEXT, 
	node TEXT, 
	outcome TEXT, 
	reason TEXT NOT NULL, 
	asked_at DATETIME NOT NULL, 
	joined_at DATETIME, 
	ended_at DATETIME, 
	CONSTRAINT pk_replacements PRIMARY KEY (id), 
	CONSTRAINT fk_replacements_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
CREATE TABLE resihp_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT resihp_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "resihp_version" VALUES('0001');
CREATE TABLE workers (
	job_id INTEGER NOT NULL, 
	rank INTEGER NOT NULL, 
	node TEXT NOT NULL, 
	device INTEGER NOT NULL, 
	pid INTEGER NOT NULL, 
	epoch_joined INTEGER NOT NULL, 
	epoch_left INTEGER, 
	exit INTEGER, 
	started_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	CONSTRAINT pk_workers PRIMARY KEY (job_id, rank), 
	CONSTRAINT fk_workers_job_id_node FOREIGN KEY(job_id, node) REFERENCES nodes (job_id, node) ON DELETE CASCADE, 
	CONSTRAINT fk_workers_job_id FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "workers" VALUES(1,0,'n1',0,1000,0,2,-9,'2025-06-15 15:06:40.200000','2025-06-15 15:06:43.450000');
INSERT INTO "workers" VALUES(1,1,'n1',1,1001,0,NULL,NULL,'2025-06-15 15:06:40.200000',NULL);
INSERT INTO "workers" VALUES(1,2,'n1',2,1002,0,NULL,NULL,'2025-06-15 15:06:40.200000',NULL);
INSERT INTO "workers" VALUES(1,3,'n1',3,1003,0,NULL,NULL,'2025-06-15 15:06:40.200000',NULL);
INSERT INTO "workers" VALUES(1,4,'n2',0,1004,0,NULL,NULL,'2025-06-15 15:06:40.200000',NULL);
INSERT INTO "workers" VALUES(1,5,'n2',1,1005,0,1,-9,'2025-06-15 15:06:40.200000','2025-06-15 15:06:43.300000');
INSERT INTO "workers" VALUES(1,6,'n2',2,1006,0,NULL,NULL,'2025-06-15 15:06:40.200000',NULL);
INSERT INTO "workers" VALUES(1,7,'n2',3,1007,0,NULL,NULL,'2025-06-15 15:06:40.200000',NULL);
INSERT INTO "workers" VALUES(1,8,'n3',0,1008,0,NULL,NULL,'2025-06-15 15:06:40.200000',NULL);
INSERT INTO "workers" VALUES(1,9,'n3',1,1009,0,NULL,NULL,'2025-06-15 15:06:40.200000',NULL);
INSERT INTO "workers" VALUES(1,10,'n3',2,1010,0,NULL,NULL,'2025-06-15 15:06:40.200000',NULL);
INSERT INTO "workers" VALUES(1,11,'n3',3,1011,0,NULL,NULL,'2025-06-15 15:06:40.200000',NULL);
CREATE INDEX ix_jobs_name_host ON jobs (name, host);
CREATE INDEX ix_jobs_started_at ON jobs (started_at);
CREATE INDEX ix_drains_job_id_node ON drains (job_id, node);
CREATE INDEX ix_events_job_id_at ON events (job_id, at);
CREATE INDEX ix_iterations_job_id_finished_at ON iterations (job_id, finished_at);
CREATE INDEX ix_probes_job_id_node ON probes (job_id, node);
CREATE INDEX ix_rank_reports_job_id_iteration_rank ON rank_reports (job_id, iteration, rank);
CREATE INDEX ix_replacements_job_id_node ON replacements (job_id, node);
CREATE INDEX ix_failures_job_id_node ON failures (job_id, node);
CREATE INDEX ix_workers_job_id_node ON workers (job_id, node);
COMMIT;
