import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessLock;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.framework.recipes.locks.InterProcessReadWriteLock;
import org.apache.curator.retry.RetryOneTime;

/**
 * Curator's locks ("mutex", "read", "write"), told by lines what to do: "acquire mutex", "try mutex", "release mutex".
 * Answers each with one line.
 */
public class Contender {
    public static void main(String[] words) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(words[0], 10000, 5000, new RetryOneTime(100));
        client.start();
        client.blockUntilConnected();
        InterProcessReadWriteLock both = new InterProcessReadWriteLock(client, words[1]);
        Map<String, InterProcessLock> locks =
                Map.of(
                        "mutex", new InterProcessMutex(client, words[1]),
                        "read", both.readLock(),
                        "write", both.writeLock());
        System.out.println("ready");
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            InterProcessLock lock = locks.get(line.split(" ")[1]);
            switch (line.split(" ")[0]) {
                case "acquire" -> {
                    lock.acquire();
                    System.out.println("held");
                }
                case "try" -> System.out.println(lock.acquire(200, TimeUnit.MILLISECONDS) ? "held" : "taken");
                default -> {
                    lock.release();
                    System.out.println("released");
                }
            }
        }
        client.close();
    }
}
