import java.io.BufferedReader;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Comparator;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * A dcpd server for each test, in Java 17. Copy this file; it needs nothing but the command dcpd.
 *
 * <pre>
 * try (DcpdServer server = new DcpdServer()) {
 *     myConsumer.connect(server.address());    // HOST:PORT of the key-value port
 *     server.failover(92, 2);                  // the newest two changes of partition 92 are lost
 * }
 * </pre>
 */
public final class DcpdServer implements AutoCloseable {
    private static final Pattern PORT = Pattern.compile("^ +(key-value|admin) +.*:(\\d+)$");
    private static final String GUEST =
        "Basic " + Base64.getEncoder().encodeToString("guest:guest".getBytes());

    private final Path folder = Files.createTempDirectory("dcpd-test-");
    private final HttpClient http = HttpClient.newHttpClient();
    private final List<String> options;
    private String port = "0";
    private String adminPort = "0";
    private Process process;

    /** Start a server on free ports and a new folder. {@code options} are those of dcpd. */
    public DcpdServer(String... options) throws IOException {
        this.options = List.of(options);
        start();
    }

    public String address() {
        return "127.0.0.1:" + port;
    }

    public String adminUrl() {
        return "http://127.0.0.1:" + adminPort;
    }

    /** Start the process again after kill(), with the same folder and ports. */
    public void start() throws IOException {
        List<String> command = new ArrayList<>(List.of(
            System.getenv().getOrDefault("DCPD", "dcpd"), "--port", port, "--admin-port", adminPort,
            "--data", folder.resolve("data").toString()));
        command.addAll(options);
        process = new ProcessBuilder(command)
            .redirectError(ProcessBuilder.Redirect.INHERIT).start();
        BufferedReader output = process.inputReader();
        String line;
        while ((line = output.readLine()) != null) {
            Matcher found = PORT.matcher(line);
            if (found.find() && found.group(1).equals("admin")) {
                adminPort = found.group(2);
            } else if (found.reset().find()) {
                port = found.group(2);
            }
            if (line.startsWith("  try ")) { // the last line: it is ready
                return;
            }
        }
        throw new IOException("dcpd did not start: see its output");
    }

    /** Kill it (SIGKILL). What was answered is on disk. */
    public void kill() throws InterruptedException {
        process.destroyForcibly().waitFor();
    }

    /** Stop it, and delete its folder. */
    @Override
    public void close() throws IOException {
        process.destroy();
        process.onExit().join();
        try (var paths = Files.walk(folder)) {
            for (Path path : paths.sorted(Comparator.reverseOrder()).toList()) {
                Files.delete(path);
            }
        }
    }

    /** Undo the changes of a partition above a seqno. Its streams end with reason 6. */
    public String branch(int vb, long at) throws IOException, InterruptedException {
        return post("vbuckets/" + vb + "/branch", "{\"at\": " + at + "}");
    }

    /** Fail over to a copy that was {@code lose} changes behind. Streams end with reason 2. */
    public String failover(int vb, long lose) throws IOException, InterruptedException {
        return post("vbuckets/" + vb + "/failover", "{\"lose\": " + lose + "}");
    }

    /** POST JSON to the HTTP API; return the answer, which is JSON. */
    public String post(String path, String json) throws IOException, InterruptedException {
        HttpRequest request = HttpRequest.newBuilder(URI.create(adminUrl() + "/api/v1/" + path))
            .header("Authorization", GUEST).header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(json)).build();
        HttpResponse<String> answer = http.send(request, HttpResponse.BodyHandlers.ofString());
        if (answer.statusCode() >= 300) {
            throw new IOException(path + ": " + answer.statusCode() + " " + answer.body());
        }
        return answer.body();
    }
}
